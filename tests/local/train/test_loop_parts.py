"""Parts of the loop: how batches reach a device, and the learning rate of a step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeromesh.train.config import OptimizerConfig
from zeromesh.train.loop import learning_rate


def test_cosine_rises_falls_and_ends_where_asked():
    config = OptimizerConfig(lr=1.0, warmup_steps=4, final_lr_ratio=0.1)
    rates = [learning_rate(config, step, 21) for step in range(21)]
    assert rates[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert (rates[12], rates[20]) == pytest.approx((0.55, 0.1))
    constant = OptimizerConfig(lr=1.0, warmup_steps=2, schedule="constant")
    assert [learning_rate(constant, step, 5) for step in range(5)] == [0.5, 1.0, 1.0, 1.0, 1.0]


@given(steps=st.integers(1, 60), warmup=st.integers(0, 60), ratio=st.floats(0, 1))
def test_rate_stays_within_its_bounds(steps, warmup, ratio):
    config = OptimizerConfig(lr=3.0, warmup_steps=min(warmup, steps), final_lr_ratio=ratio)
    rates = [learning_rate(config, step, steps) for step in range(steps)]
    assert all(0 < rate <= 3.0 or (rate == 0 and ratio == 0) for rate in rates)
    after = rates[config.warmup_steps :]
    assert after == sorted(after, reverse=True)
