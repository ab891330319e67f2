"""Stages are all that can be sharded over one axis."""

from __future__ import annotations

from itertools import product

from zeromesh.strategy import Stage


def test_every_combination_that_can_be_is_one_stage():
    """Who has a part of parameters or gradients has that part of the states; only what is gathered is kept."""
    can_be = {
        (params, grads, states, kept)
        for params, grads, states, kept in product((False, True), repeat=4)
        if states >= (params or grads) and params >= kept
    }
    stages = [(stage.shards_params, stage.shards_grads, stage.shards_states, stage.kept) for stage in Stage]
    assert len(stages) == len(set(stages)) and set(stages) == can_be


def test_buffers_are_cut_by_what_is_sharded_furthest_first():
    for one, other in product(Stage, repeat=2):
        if one.shards_params >= other.shards_params and one.shards_grads >= other.shards_grads and one.shards_states:
            assert one.significance <= other.significance
