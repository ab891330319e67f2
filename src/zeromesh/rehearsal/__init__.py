"""A training step as any rank of any number, on a virtual device: what `zeromesh rehearse` and `zm.rehearse` run.

Read in this order: `result` (what is found), `places` (where a step is), `kernels` and `hardware` (seconds), `timeline`
(streams with virtual clocks), `watch` (what the device tells), `steps` (a rehearsal), `training` and `own` (whose
steps), `launch` (processes), `compare` and `show`.
"""
