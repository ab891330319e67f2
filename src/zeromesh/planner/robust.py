"""How far a recommendation depends on constants that public measurements leave open.

Some constants of the cost model have a stated range (`cost.constants.provenance`). Each one that matters for the
cluster is set to both ends of its range, with the others as shipped, and the fastest layouts of a few kinds are
simulated. A layout's regret is its step time over the shortest there, less one, at the worst of all ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from zeromesh.cluster.cluster import Cluster
from zeromesh.cost.constants import Provenance, provenance
from zeromesh.planner.evaluate import Estimate, Evaluator

CONTENDERS = 4
"""Layouts that are compared."""

_LEAST = 0.01
"""Regrets up to this are ignored."""

_LINK = "link_share."

_MEANINGS = {
    "channel_share": "the share of a multiprocessor that a collective's channel takes",
    "node_passes": "how often bytes of a collective inside a node pass through a device's memory",
    "host_issue_s": "the seconds in which a host issues a transfer",
    "host_memory_bytes_per_s": "the bytes/s of a host's memory in an optimizer's step",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependence:
    """A constant for which another layout may be faster than the one to recommend."""

    constant: str
    meaning: str
    value: float  # as shipped
    end: float  # the end of its range at which the layout loses most
    layout: str  # would be recommended without regard to this
    faster: str  # the fastest layout at that end
    lost: float  # the layout's step time there over the fastest one's, less 1

    def __str__(self) -> str:
        return (
            f"the choice depends on {self.meaning}: if it is {self.end:.3g} instead of {self.value:.3g}, {self.faster} "
            f"takes {self.lost / (1 + self.lost):.1%} less time than {self.layout}"
        )


def least_regret(
    evaluator: Evaluator, contenders: Sequence[Estimate], within: float, longest_s: float
) -> tuple[Estimate, Dependence | None]:
    """The contender to recommend, and the constant that costs the first one most, if that is over 1 % and `within`.

    Args:
        evaluator: with the constants as shipped.
        contenders: the layout to recommend if these are true, then others.
        within: the first contender stays unless another one's regret is smaller by more than this.
        longest_s: longest step time of a recommended layout with the constants as shipped.
    """
    hosted = any(each.candidate.strategy.hosted for each in contenders)
    ends = [
        (constant, end)
        for constant in open_constants(evaluator.cluster, hosted=hosted)
        for end in (constant.low, constant.high)
        if end is not None and end != constant.value
    ]
    if len(contenders) == 1 or not ends:
        return contenders[0], None
    others = [replace(evaluator, constants=evaluator.constants.at(constant.name, end)) for constant, end in ends]
    steps = [[other.estimate(each.candidate).step_s for each in contenders] for other in others]
    regrets = [max(row[index] / min(row) - 1 for row in steps) for index in range(len(contenders))]
    if regrets[0] <= max(within, _LEAST):
        return contenders[0], None
    (constant, end), row = max(zip(ends, steps, strict=True), key=lambda pair: pair[1][0] / min(pair[1]))
    least = min((i for i, each in enumerate(contenders) if each.step_s <= longest_s), key=regrets.__getitem__)
    best = contenders[least if regrets[least] < regrets[0] - within else 0]
    return best, Dependence(
        constant=constant.name,
        meaning=_MEANINGS.get(constant.name)
        or f"the share of its rate that a link reaches ({constant.name.removeprefix(_LINK)})",
        value=constant.value,
        end=end,
        layout=contenders[0].candidate.named,
        faster=contenders[row.index(min(row))].candidate.named,
        lost=regrets[0],
    )


def open_constants(cluster: Cluster, *, hosted: bool) -> Iterator[Provenance]:
    """Constants with a range on which steps on the cluster depend; with `hosted`, those of its hosts' memory too."""
    matter = {_LINK + cluster.link_kind(index) for index, level in enumerate(cluster.levels) if level.size > 1}
    matter |= _MEANINGS.keys()
    if not hosted or cluster.host_step_bytes_per_s is not None:
        matter.remove("host_memory_bytes_per_s")
    for constant in provenance() if cluster.device.cores is None else ():
        if constant.low is not None and constant.name in matter:
            yield constant
