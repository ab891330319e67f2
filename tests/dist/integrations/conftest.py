"""What these tests' ranks import takes seconds on each of them: the server from which they are forked does it once."""

from __future__ import annotations

from tests.dist import pool

pool.PRELOAD += ["transformers.trainer", "transformers.models.llama.modeling_llama", "accelerate", "peft", "lightning"]
