"""Clips by libraries of gradients in the host's memory are left to the step there, and are those of plain runs."""

from pathlib import Path
from unittest import mock

import pytest

from tests.dist.integrations.by_hand import INTEGRATIONS
from tests.dist.integrations.hugging import STEPS, assert_same_curve, launched, plain, sharding
from tests.dist.pool import on_ranks
from zeromesh.engine import beside


@pytest.mark.parametrize("name", ["trainer", "accelerate", "lightning", "fabric"])
@on_ranks(2)
def test_a_clip_is_left_to_the_step(tmp_path, name):
    integration = INTEGRATIONS[name]
    expected = plain(lambda: integration.run(Path(tmp_path) / "plain", "llama", None, False))
    assert max(norm for _, _, norm in expected) > integration.clip
    with launched(), mock.patch.object(beside, "leave_to_step", wraps=beside.leave_to_step) as left:
        how = sharding("host=2,node=3", {"node": 2})
        assert_same_curve(integration.run(Path(tmp_path) / "sharded", "llama", how, False), expected)
    assert left.call_count == STEPS
