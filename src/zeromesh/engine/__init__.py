"""`zm.shard` and the engine behind it.

Reading order: `units` (cutting a module), `param` (the optimizer's slices), `flat` (one buffer's tensors), `chain`
(its collectives), `backend` (the schedule's ops on devices), `engine` (autograd to points), `hooks`, `optim`, `build`,
`api`.
"""
