import pytest

from zeromesh.cluster import preset
from zeromesh.cost import ComputeModel, default_constants
from zeromesh.cost.transfer import TransferModel
from zeromesh.schedule import Transfer
from zeromesh.schedule.transfer import wire_bytes
from zeromesh.strategy import Layout

CONSTANTS = default_constants()
CLUSTER = preset("a800-8x-hdr").take(64)
MODEL = TransferModel(CLUSTER, CONSTANTS, ComputeModel(device=CLUSTER.device, constants=CONSTANTS))
NODE, OUTER = Layout.of("node=3,cluster=3", CLUSTER.axes).axes
NUMEL = 2**28


def transfer(operation: str, axis=OUTER, wire: str = "bf16") -> Transfer:
    return Transfer(operation=operation, axis=axis, numel=NUMEL, wire=wire)


@pytest.mark.parametrize("operation", ["all_gather", "reduce_scatter", "all_reduce"])
def test_sent_bytes_are_the_schedules(operation):
    for axis in (NODE, OUTER):
        step = transfer(operation, axis)
        assert MODEL.cost(step).sent_bytes == pytest.approx(step.sent_bytes)


@pytest.mark.parametrize("operation", ["all_gather", "reduce_scatter", "all_reduce"])
def test_narrow_wires_are_faster_between_nodes(operation):
    seconds = [MODEL.cost(transfer(operation, wire=wire)).seconds for wire in ("fp32", "bf16", "int8", "int4")]
    assert seconds == sorted(seconds, reverse=True)


def test_a_quantised_wire_pays_for_its_kernels():
    step = transfer("all_gather", wire="int8")
    on_the_wire = wire_bytes(NUMEL // 8, "int8") * 8
    plain = MODEL.joint((OUTER,), "all_gather", on_the_wire // 2, "bf16").seconds
    kernels = MODEL.cost(step).seconds - plain
    assert kernels == pytest.approx(MODEL.compute.memory(2 * NUMEL * (1 + 1 / 8) + 2 * on_the_wire), rel=1e-3)


def test_a_joint_group_is_a_flat_ring_or_what_is_asked_for():
    flat, two_level, overlapped = (
        MODEL.joint((NODE, OUTER), "all_gather", NUMEL, "bf16", algorithm)
        for algorithm in ("flat", "hierarchical", "ho_ring")
    )
    assert flat.seconds != two_level.seconds
    assert overlapped.seconds < two_level.seconds
    chain = [MODEL.joint((OUTER,), "all_gather", NUMEL // 8, "bf16"), MODEL.joint((NODE,), "all_gather", NUMEL, "bf16")]
    assert two_level.seconds == pytest.approx(sum(cost.seconds for cost in chain))


def test_what_was_asked_before_is_remembered():
    assert MODEL.cost(transfer("all_gather")) is MODEL.cost(transfer("all_gather"))
