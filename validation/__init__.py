"""The simulator held against published measurements: `make validate`, see README.md."""
