"""Training steps of a small Llama over a matrix of settings, measured and predicted: `make bench`, see README.md."""
