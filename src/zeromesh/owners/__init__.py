"""Optimizers that step on whole tensors, each on its owner's rank.

`zeromesh.pieces` chooses owners and routes to them; `zeromesh.schedule` decides when tensors move. Reading order:
`bucket` (whole tensors on this rank, and their way there and back), `stacks` (tensors of one shape, stepped on at
once), `trial` (which optimizers treat each tensor by itself), `optimizer` (for users).
"""
