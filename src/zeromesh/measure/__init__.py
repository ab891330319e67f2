"""What a machine does, measured, and laid beside what was predicted. Needs torch, but for reading results.

Reading order: `fit` (timings to a line), `launch` (a task on all ranks), `links` and `machine` (what is timed
there), `probe` (a cluster file of it), `llama` (the model that is trained), `steps` (training steps, measured and
predicted), `selftest`.
"""
