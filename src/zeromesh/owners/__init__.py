"""Optimizers that step on whole tensors, each where its owner is.

Owners of tensors and ways to them are decided in `zeromesh.pieces`; when, in `zeromesh.schedule`. Reading order:
`bucket` (whole tensors on this rank, and their way there and back), `stacks` (of one shape, at once), `trial` (which
optimizers treat each tensor by itself), `limit` (whether there is memory for them), `optimizer` (for users).
"""
