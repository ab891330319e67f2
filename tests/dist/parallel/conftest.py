"""Models that these tests' ranks build: the server from which the ranks are forked imports them once."""

from tests.dist import pool

pool.PRELOAD += [f"transformers.models.{name}.modeling_{name}" for name in ("mixtral", "deepseek_v3")]
pool.PRELOAD += ["transformers.distributed.tensor_parallel"]
