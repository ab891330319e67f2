"""Rehearses a training step as any rank of any number, on a virtual device: `zeromesh rehearse` and `zm.rehearse`.

Reading order: `result` (the findings), `places` (where a step is), `hardware` (seconds), `timeline` (streams with
virtual clocks), `watch` (the device's reports), `steps` (a rehearsal), `virtual`, `training` and `own` (the steps of a
run, and those of a user), `launch` (processes) and `show`.
"""
