"""Enumerates layouts, prunes, simulates, ranks and explains. Torch-free."""
