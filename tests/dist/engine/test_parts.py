"""Parts with layouts of their own train as one process does, and hold, send and save as their layouts do."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist

import zeromesh as zm
from tests.dist.parity import Case, backward, check_case, mesh_of, sharded
from tests.dist.pool import on_ranks
from tests.pure.strategy.mixes import mixes, notation
from zeromesh.engine import build as build_module
from zeromesh.engine import parts as parts_module
from zeromesh.engine.api import engine_of
from zeromesh.errors import MeshError, ModelError, NotationError, OptimizerError

MIXES = [notation(mix) for mix in mixes(2, kept=True)]
PAIRS = list(zip(MIXES[::4], reversed(MIXES[1::4]), strict=False))
"""Strategies of the model, and of parts inside its units."""
CASE = Case(precision="fp32")


def in_parts(own: str, other: str) -> str:
    """One part inside of blocks, one of a class that is blocks, and one of a unit of its own."""
    third = MIXES[(MIXES.index(own) + MIXES.index(other)) % len(MIXES)]
    return f"{own} | *.up: {other} | <Scale>: {third} | head: {other}"


@on_ranks(4)
def test_parts_on_the_same_mesh():
    assert len(PAIRS) == 10 and all(own != other for own, other in PAIRS)
    for at, (own, other) in enumerate(PAIRS[::4]):
        case = Case(weighted=True) if at % 2 else Case(optimizer="both", debug=True)
        check_case(in_parts(own, other), case, 2, 2)


@on_ranks(4)
def test_a_lender_is_known_to_gather_beside_its_reductions():
    """Its communicators then share no buffers. Sums of stage 0 over two axes are gathered beside others too."""
    for own, other, expected in (
        ("node=1,cluster=0", "node=3d,cluster=0", {"node"}),
        ("node=1,cluster=0", "node=2,cluster=0", set()),
        ("node=0,cluster=0", "node=1,cluster=0", {"node"}),
    ):
        with (
            mock.patch.object(parts_module, "make_groups", side_effect=parts_module.make_groups) as made,
            sharded(f"{own} | *.up: {other}", CASE, mesh_of(2, 2)) as (model, _),
        ):
            assert sum(group.lender is not None for group in engine_of(model).backend.groups.values()) == 2
        assert all(call.kwargs["beside"] == expected for call in made.call_args_list) and made.called
    for strategy, expected in (("node=0,cluster=0", {"node"}), ("node=1,cluster=0", set())):  # without parts
        with mock.patch.object(build_module, "make_groups", side_effect=build_module.make_groups) as made:
            zm.shard(CASE.build(), mesh_of(2, 2), strategy, **CASE.shard_options())
        assert [call.kwargs["beside"] for call in made.call_args_list] == [expected]


@on_ranks(4)
def test_what_is_held_sent_and_saved(tmp_path):
    saved: dict[str, torch.Tensor] = {}
    for step, text in enumerate(
        ("node=3,cluster=1 | *.up: node=0,cluster=3k", "node=1,cluster=0 | *.up: node=3,cluster=2")
    ):
        with sharded(text, CASE, mesh_of(2, 2)) as (model, optimizer):
            checkpoints = zm.Checkpoints(tmp_path, model, optimizer.members[0])
            if step:
                checkpoints.load()
                restored = zm.full_state_dict(model)
                assert all(torch.equal(restored[name], saved[name]) for name in saved)
            backward(model, CASE, 0)
            with zm.traffic_report(model, micro_batches=2) as traffic:
                optimizer.step()
                optimizer.zero_grad()
                backward(model, CASE, 1)
            lines = traffic.lines()
            assert [line.axis for line in lines] == ["node", "cluster", "*.up:node", "*.up:cluster"]
            assert all(line.sent_bytes == line.predicted_bytes > 0 for line in lines)
            for line in zm.memory_report(model, optimizer.members[0]):
                assert line.kind in ("optimizer", "total") or line.predicted_bytes == line.allocated_bytes, line
            zm.check_replicas(model, optimizer.members)
            saved = zm.full_state_dict(model)
            checkpoints.save(step)
            checkpoints.close()


@on_ranks(4)
def test_quantised_wires_of_a_part_are_its_alone():
    """Where its gradients alone are rounded, the others' are to the bit the same as without."""
    grads = list[dict[str, torch.Tensor]]()
    for wire in ("", "@/int8", "@/int4"):
        with sharded(f"node=3,cluster=1 | *.up: node=3{wire},cluster=1{wire}", CASE, mesh_of(2, 2)) as (model, _):
            backward(model, CASE, 0)
            grads.append({n: p.grad.local.clone() for n, p in model.named_parameters() if p.grad is not None})
            lenders = {name: group.lender for name, group in engine_of(model).backend.groups.items()}
            assert {name: lender and lender.name for name, lender in lenders.items()} == {
                "node": None,
                "cluster": None,
                "*.up:node": "node",
                "*.up:cluster": "cluster",
            }
    off = {name: [float((grad[name] - value).norm()) for grad in grads] for name, value in grads[0].items()}
    for name, (_, little, more) in off.items():
        if ".up." in name and grads[0][name].numel():
            assert 0 < little < more < 0.3 * float(grads[0][name].norm()), name
        else:
            assert little == more == 0, name


@on_ranks(2)
def test_parts_that_cannot_be():
    for parts, error, message in (
        ("*.ups: node=0", NotationError, r"part \*\.ups matches no module of the model: .*up"),
        ("<AwkwardBlok>: node=0", NotationError, r"part <AwkwardBlok> matches no module of the model.*<AwkwardBlock>"),
        ("*.up: node=0 | layers.0: node=1", ModelError, r"layers\.0\.up\.\w+ belongs to the parts \*\.up and layers\."),
        ("*.mix: node=0", ModelError, r"mix\.weight \(\*\.mix\), \S+mix_again\.weight \(in no part\) are one tied"),
        ("*.up: expert=0", MeshError, r"part \*\.up: the mesh has no axis 'expert'.*for other axes give zm\.Part"),
    ):
        with pytest.raises(error, match=message):
            zm.shard(CASE.build(), mesh_of(2), f"node=3 | {parts}")


@on_ranks(2)
def test_owners_are_of_one_layout():
    model = zm.shard(CASE.build(), mesh_of(2), "node=3 | head: node=1")
    named = dict(model.named_parameters())
    own = zm.by_owner(torch.optim.Muon, [named["head.weight"]], lr=0.1)
    with pytest.raises(OptimizerError, match=r"tensors over the ranks of one layout; got some of no part, part head"):
        zm.by_owner(torch.optim.Muon, [named["head.weight"], named["layers.0.up.weight"]])
    backward(model, CASE, 0)
    before = zm.full_state_dict(model)
    own.step()
    after = zm.full_state_dict(model)
    assert dist.get_rank() or not torch.equal(before["head.weight"], after["head.weight"])
