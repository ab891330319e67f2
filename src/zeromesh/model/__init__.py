"""Parameters, FLOPs and activation bytes of a model, per unit. Torch-free except `from_module`."""
