"""Checkpoints that load under any layout: files, names, checksums. Knows slices of named tensors, not engines.

Reading order: `boxes` (slices as boxes), `piece` (what a rank holds), `container` and `manifest` (the format),
`storage`, `write`, `read`, `directory`, `saver`, `loader`; `dcp` and `foreign` (torch.distributed.checkpoint),
`safetensors` (Hugging Face), `plain` and `randomness` (states that are no parameters).
"""
