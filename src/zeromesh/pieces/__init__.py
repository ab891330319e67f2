"""Pieces of named tensors that a rank holds. The engine and the checkpoints both build on them.

Reading order: `boxes` (slices as boxes), `piece` (a slice), `sliced` (a slice as a tensor of the whole's shape).
`owners` (which rank has which tensor whole) and `passage` (how slices get there and back) need no torch.
"""
