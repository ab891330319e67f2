"""`zm.shard` and what runs behind it.

Reading order: `units` (cutting a module), `param` (what the optimizer holds), `flat` (one buffer's tensors), `chain`
(its collectives), `backend` (the schedule's ops on devices), `engine` (autograd to points), `hooks`, `optim`, `build`,
`api`.
"""
