"""What a rank holds of named tensors. Neither engines nor files: both build on it.

Reading order: `boxes` (slices as boxes), `piece` (a slice), `sliced` (a slice as a tensor of the whole's shape).
"""
