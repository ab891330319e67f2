"""Saving and loading a sharded model, under any layout: what users call, and the files behind it.

Reading order: `container` and `manifest` (the format), `storage`, `write`, `read`, `directory`, `staging`, `saver`,
`loader`; `collect`, `restore` and `groups` (a model and its optimizers as pieces, and back), `plain` and `randomness`
(states that are no parameters), `checkpoints` (all of it); `dcp` and `foreign` (torch.distributed.checkpoint),
`safetensors` and `huggingface`; `full_state` (whole tensors).
"""
