"""Imports of these tests' ranks take seconds: the server from which the ranks are forked does them once."""

from tests.dist import pool

pool.PRELOAD += ["transformers.trainer", "transformers.models.llama.modeling_llama", "accelerate", "peft", "lightning"]
pool.PRELOAD += ["trl.trainer.sft_trainer", "trl.trainer.dpo_trainer", "torch._inductor.compile_fx"]
pool.PRELOAD += ["torch._inductor.lowering", "networkx", "tensorboard.summary.writer"]
