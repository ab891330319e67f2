"""Measurements of a machine, compared with predictions. Reading results needs no torch.

Reading order: `fit` (timings to a line), `launch` (a task on all ranks), `links` and `machine` (the timings), `probe`
(makes a cluster file of them), `llama` (the model that is trained), `steps` (training steps, measured and predicted),
`selftest`.
"""
