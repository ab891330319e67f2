"""Saving and loading a sharded model, under any layout: the calls of users, and the files behind them.

Reading order: `manifest` (the format), `storage`, `write`, `read`, `directory`, `saver`, `loader`; `states` and
`tensors` (a model and its optimizers as a checkpoint has them, and back), `checkpoints` (all of it); `dcp`
(torch.distributed.checkpoint), `safetensors` and `huggingface`; `full_state` (whole tensors).
"""
