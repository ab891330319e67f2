"""Model-state bytes: the published table to its last digit, and what the schedule allocates."""

from __future__ import annotations

import pytest

from tests.pure.planner.setups import small_model
from zeromesh.model import UnitKind
from zeromesh.planner import model_state
from zeromesh.schedule import Schedule
from zeromesh.simulator import FixedWorkload
from zeromesh.simulator.units import schedule_units
from zeromesh.strategy import Layout

MESH = (("node", 8), ("cluster", 128))
PARAMS = {"7B": 6.738e9, "13B": 13.016e9, "30B": 27.57e9, "65B": 65.286e9}

# (2/s_p + 2/s_g + 12/s_os) * Psi in GB, gradients in bf16; the sources print four digits.
TABLE = {
    "node=0,cluster=0": ("107.8", "208.3", "441.1", "1044.6"),
    "node=1,cluster=0": ("37.06", "71.59", "151.6", "359.1"),
    "node[4]=3,node[2]=1,cluster=0": ("16.84", "32.54", "68.92", "163.2"),
    "node=3,cluster=0": ("13.48", "26.03", "55.14", "130.6"),
    "node=3,cluster[4]=1,cluster[*]=0": ("5.90", "11.39", "24.12", "57.13"),
    "node=3,cluster[4]=3,cluster[*]=0": ("3.37", "6.51", "13.79", "32.64"),
    "node=2,cluster[4]=1,cluster[*]=0": ("17.69", "34.17", "72.37", "171.4"),
    "node=3d,cluster[4]=1,cluster[*]=0": ("17.69", "34.17", "72.37", "171.4"),
}


@pytest.mark.parametrize(("strategy", "printed"), TABLE.items())
def test_model_state_equals_the_published_table(strategy: str, printed: tuple[str, ...]) -> None:
    layout = Layout.of(strategy, MESH)
    for params, digits in zip(PARAMS.values(), printed, strict=True):
        total = model_state(layout, round(params), grad_dtype="bf16").total / 1e9
        decimals = len(digits.partition(".")[2])
        assert f"{total:.{decimals}f}" == digits


@pytest.mark.parametrize(
    "strategy",
    [
        *TABLE,
        "node=3,cluster=3k",
        "node=3,cluster=3k@int8/",
        "node=3,cluster=3k@fp32/",
        "node=3k,cluster=3k",
        "node=2,cluster=2",
        "node=3,cluster=3",
    ],
)
@pytest.mark.parametrize("grad_dtype", ["fp32", "bf16"])
def test_closed_form_equals_what_the_schedule_allocates(strategy: str, grad_dtype: str) -> None:
    """Up to padding: at most one element per rank, unit and buffer."""
    model, mesh = small_model(), (("node", 4), ("cluster", 8))
    strategy = strategy.replace("node[4]=3,node[2]=1", "node[2]=3,node[2]=1")
    layout = Layout.of(strategy, mesh)
    workload = FixedWorkload(seq_len=64, global_batch_tokens=64 * 32, grad_dtype=grad_dtype)
    memory = Schedule.of(layout, schedule_units(model, workload)[0]).memory
    state = model_state(layout, model.num_params, grad_dtype=grad_dtype)
    slack = 16 * 32 * sum(unit.count for unit in model.units)
    assert memory.params_bytes == pytest.approx(state.params, abs=slack)
    assert memory.grads_bytes == pytest.approx(state.grads, abs=slack)
    # Embedding, head and root stay gathered in slots of their own: the blocks alone have kept copies.
    blocks = sum(unit.count * unit.num_params for unit in model.units if unit.kind is UnitKind.BLOCK)
    kept = sum(buffer.kept for unit in memory.persistent for buffer in unit)
    assert kept == pytest.approx(state.kept * blocks / model.num_params, abs=slack)
    moments = 8 * model.num_params / layout.degree(layout.significant)
    assert memory.master_bytes + moments == pytest.approx(state.optimizer, abs=slack)


def test_one_tensor_is_counted_once() -> None:
    """fp32 masters are parts of fp32 compute copies, unless these hold what came over a wire of less precision."""
    layout = Layout.of("node=3,cluster=0", MESH)
    state = model_state(layout, 8000, param_dtype="fp32")
    assert (state.params, state.optimizer) == (4000.0, 8000.0)
    other = model_state(Layout.of("node=3,cluster=1", MESH), 8000, param_dtype="fp32")
    assert other.optimizer == 8 * 8000 / 1024
    over_bf16 = model_state(Layout.of("node=3,cluster=1@bf16/", MESH), 8000, param_dtype="fp32")
    assert over_bf16.optimizer == 12 * 8000 / 1024


def test_frozen_parameters_have_no_gradient_and_no_states() -> None:
    layout = Layout.of("node=3,cluster=1", MESH)
    state = model_state(layout, 1024, 128)
    assert (state.params, state.grads, state.optimizer) == (256.0, 64.0, 1.5)
