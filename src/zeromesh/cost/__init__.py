"""Seconds and bytes of an operation: collectives on a hierarchy, compute, memory. Torch-free."""
