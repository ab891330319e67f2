"""Pieces of named tensors that a rank holds. Engines and files both build on it.

Reading order: `boxes` (slices as boxes), `piece` (a slice), `sliced` (a slice as a tensor of the whole's shape).
`owners` (who has which tensor whole) and `passage` (how slices come to them and back) need no torch.
"""
