"""A training step as any rank of any number, on a virtual device: the work of `zeromesh rehearse` and `zm.rehearse`.

Read in this order: `result` (the findings), `places` (where a step is), `hardware` (seconds), `timeline` (streams with
virtual clocks), `watch` (the device's reports), `steps` (a rehearsal), `virtual`, `training` and `own` (whose steps),
`launch` (processes) and `show`.
"""
