"""Compares the simulator with published measurements: `make validate`, see README.md."""
