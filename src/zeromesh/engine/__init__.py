"""`zm.shard` and the engine behind it.

Reading order: `units` (cutting a module), `param` (the optimizer's slices), `flat` (one buffer's tensors), `chain`
(its collectives), `backend` (the schedule's ops on devices), `engine` (autograd to points), `hooks`, `optim`, `build`,
`api`.

The other files are for features, and loaded by whoever asks for one: `steps` (the functions of a step), `parts`,
`spread` (DTensors), `lazy` and `materialise` (tensors without values), `casts` (`param_dtype`), `functions`,
`reductions`, `meetings` and `whole` (numbers and tensors of all ranks), `hosted` and `beside` (`host=`), `parked`,
`vouched` (other optimizers) and `guard`.
"""
