"""The learning rate of a step."""

from __future__ import annotations

import math

from zeromesh.train.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """The learning rate of step 0 <= `step` < `steps`.

    Rises linearly over the warm-up, whose last step has the full rate, then stays, or falls along half a cosine that
    ends with `final_lr_ratio * lr` at the last step.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    span = max(1, steps - 1 - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / span)
    ratio = config.final_lr_ratio
    return config.lr * (ratio + (1 - ratio) * 0.5 * (1 + math.cos(math.pi * progress)))
