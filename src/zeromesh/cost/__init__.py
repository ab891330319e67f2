"""Seconds and bytes of an op: collectives on a hierarchy, compute, memory. Torch-free."""
