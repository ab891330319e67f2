"""One training step as data, and the interpreter that engine and simulator run it with. Torch-free.

Reading order: `unit` (its flat buffers), `transfer` (one collective), `buffer_layout` (the shards and transfers of a
flat buffer), `memory` (all buffers), `program` (points and ops), `state` (of units, forward and backward),
`interpreter` (who carries ops out). Whoever needs them imports `bucket` (whole tensors) and `step` (the canonical
order).
"""
