"""What a choice depends on, and the layout of least regret.

Some constants of the cost model have a stated range: public measurements leave them open (`zeromesh.cost.provenance`).
Each that bears on the cluster is taken at either end of its range, the others as shipped; what then is the fastest
layout may be another. A layout's regret is by how much its step is longer there than the shortest, at the worst end of
all. The most robust layout has the least. Where a constant decides which is faster, bisection finds its value from
which on, and measuring it on the cluster settles the choice.

Layouts that differ only in how often a level is cut are one contender, the fastest of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from zeromesh.cluster import Cluster
from zeromesh.cost import ComputeModel, Provenance, provenance
from zeromesh.cost.transfer import TransferModel
from zeromesh.planner.evaluate import Candidate, Estimate, Evaluator
from zeromesh.strategy import Layout
from zeromesh.units import format_seconds

Dimension = Literal["share", "s"]

CONTENDERS = 4
"""Layouts that are compared: the fastest of each kind."""

_NEAR = 1.25
"""Contenders that are slower than the fastest by more than this stay so within every range that is stated."""

_HALVINGS = 7

_LONG = 2**32
"""Elements of a gather that is at the full rate of its links."""

_TIE = 1e-3
"""What layouts that differ by less are: equally fast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependence:
    """One constant that decides the choice.

    Args:
        constant: its name.
        quantity: what it means on this cluster.
        unit: of it: "share" or "s".
        low, high: of the quantity, as measured elsewhere.
        at: the quantity's value from which on the choice is another.
        below, above: which strategy is faster on either side.
        measure: what tells it.
    """

    constant: str
    quantity: str
    unit: Dimension
    low: float
    high: float
    at: float
    below: str
    above: str
    measure: str

    def __str__(self) -> str:
        return (
            f"{self.below} if {self.quantity} is below {self._shown(self.at)}, else {self.above}; measured elsewhere "
            f"between {self._shown(self.low)} and {self._shown(self.high)}"
        )

    def _shown(self, value: float) -> str:
        return f"{value:.1%}" if self.unit == "share" else format_seconds(value)

    def to_json(self) -> dict[str, Any]:
        return {
            "constant": self.constant,
            "quantity": self.quantity,
            "unit": self.unit,
            "measure": self.measure,
            "low": self.low,
            "high": self.high,
            "at": self.at,
            "below": self.below,
            "above": self.above,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Robust:
    """How far a choice is safe.

    Args:
        candidate: the contender of least regret; the fastest where nothing decides.
        regret: its own, as a share of the shortest step.
        fastest: the contender that is fastest with the constants as shipped.
        of_fastest: its regret.
        depends: constants that decide, the one that costs most if it is taken wrongly first.
    """

    candidate: Candidate
    regret: float
    fastest: Candidate
    of_fastest: float
    depends: tuple[Dependence, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "strategy": self.candidate.named,
            "regret": self.regret,
            "fastest": self.fastest.named,
            "regret_of_fastest": self.of_fastest,
            "depends": [each.to_json() for each in self.depends],
        }


def robust(evaluator: Evaluator, ranked: Sequence[Estimate]) -> Robust:
    """Compares the fastest layouts over the ranges.

    Args:
        evaluator: with the constants as shipped.
        ranked: what fits, fastest first.
    """
    contenders = _contenders(ranked)
    ends = [(constant, value) for constant in open_constants(evaluator.cluster) for value in other_ends(constant)]
    if len(contenders) == 1 or not ends:
        only = contenders[0]
        return Robust(candidate=only, regret=0.0, fastest=only, of_fastest=0.0, depends=())
    contenders.sort(key=replace(evaluator).step_s)
    others = [replace(evaluator, constants=evaluator.constants.at(constant.name, value)) for constant, value in ends]
    seconds = [[other.step_s(candidate) for candidate in contenders] for other in others]
    regrets = [max(row[i] / min(row) - 1 for row in seconds) for i in range(len(contenders))]
    least = min(range(len(contenders)), key=lambda i: regrets[i])
    wrong: dict[str, tuple[float, Dependence]] = {}
    for (constant, end), row in zip(ends, seconds, strict=True):
        winner = min(range(len(row)), key=row.__getitem__)
        lost = row[0] / row[winner] - 1
        if lost > _TIE and lost > wrong.get(constant.name, (0.0,))[0]:
            wrong[constant.name] = lost, _dependence(evaluator, constant, end, contenders[0], contenders[winner])
    depends = tuple(found for _, found in sorted(wrong.values(), key=lambda pair: -pair[0]))
    least = least if depends else 0
    return Robust(
        candidate=contenders[least],
        regret=regrets[least],
        fastest=contenders[0],
        of_fastest=regrets[0],
        depends=depends,
    )


def open_constants(cluster: Cluster) -> Iterator[Provenance]:
    """Constants with a range that a step on `cluster` depends on."""
    kinds = {cluster.link_kind(index) for index, level in enumerate(cluster.levels) if level.size > 1}
    for constant in provenance():
        about = constant.name.removeprefix("link_share.")
        on_links = about != constant.name
        if constant.low is not None and (about in kinds if on_links else cluster.device.cores is None):
            yield constant


def other_ends(constant: Provenance) -> list[float]:
    """The ends of its range that it is not at as shipped."""
    return [end for end in _ends(constant) if end != constant.value]


def _contenders(ranked: Sequence[Estimate]) -> list[Candidate]:
    kinds: dict[tuple[object, ...], Candidate] = {}
    for estimate in ranked:
        if estimate.step_s <= _NEAR * ranked[0].step_s and len(kinds) < CONTENDERS:
            terms = estimate.candidate.strategy.axes
            kind = (estimate.candidate.parallel, *((term.name, str(term.stage)) for term in terms))
            kinds.setdefault(kind, estimate.candidate)
    return list(kinds.values())


def _ends(constant: Provenance) -> tuple[float, float]:
    assert constant.low is not None and constant.high is not None
    return constant.low, constant.high


def _dependence(evaluator: Evaluator, constant: Provenance, end: float, one: Candidate, other: Candidate) -> Dependence:
    """Where the two change places on the way from the constant as shipped, where `one` is faster, to `end`."""
    start = evaluator.constants.value(constant.name)
    near, far = start, end
    for _ in range(_HALVINGS):
        middle = (near + far) / 2
        there = replace(evaluator, constants=evaluator.constants.at(constant.name, middle))
        near, far = (middle, far) if there.step_s(one) <= there.step_s(other) else (near, middle)
    below, above = (other, one) if end < start else (one, other)
    quantity, measure, unit, one_is = _meaning(evaluator, constant.name)
    low, high = _ends(constant)
    return Dependence(
        constant=constant.name,
        quantity=quantity,
        unit=unit,
        low=low * one_is,
        high=high * one_is,
        at=(near + far) / 2 * one_is,
        below=below.named,
        above=above.named,
        measure=measure,
    )


def _meaning(evaluator: Evaluator, name: str) -> tuple[str, str, Dimension, float]:
    """A constant as a quantity of this cluster, what measures it, its unit, and how much of it the constant's 1 is."""
    kind = name.removeprefix("link_share.")
    if kind != name:
        return f"the share of their nominal rate that {kind} links reach", "`zeromesh probe`", "share", 1.0
    if name == "host_issue_s":
        profile = "a profile of a step on the device: what the host takes from unit to unit, without its computation"
        return "the host's time to issue a transfer", profile, "s", 1.0
    one = evaluator.constants.at(name, 1.0)
    inner = replace(evaluator.cluster, levels=evaluator.cluster.levels[:1])
    transfers = TransferModel.of(inner, one, ComputeModel(device=inner.device, constants=one))
    gather = transfers.joint(Layout.of(f"{inner.levels[0].name}=3", inner.axes).axes, "all_gather", _LONG, "bf16")
    if name == "node_passes":
        copies = "a copy on the device alone and beside gathers inside a node"
        unit = gather.memory_s / gather.transfer_s
        return "the share of the device's memory bandwidth that a gather inside a node takes", copies, "share", unit
    beside = "a block's matrix products alone and beside gathers of its parameters"
    return "the share of computation that a gather inside a node takes", beside, "share", gather.taken
