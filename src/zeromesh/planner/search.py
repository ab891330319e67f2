"""Finds the fastest layout that fits.

Every candidate (layout, micro-batch, recomputation, wires) gets lower bounds on step time and memory (`bounds`).
Candidates that cannot fit are dropped. The others are simulated in the order of their bounds, until no bound is below
the best time found: then the best is the optimum. If a budget ends this earlier, the gap is the distance between the
best time and the lowest bound that is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Literal

import numpy as np

from zeromesh.cluster.cluster import HOST_SHARE, Cluster
from zeromesh.cost.constants import default_constants
from zeromesh.errors import InputError, short_repr
from zeromesh.model.spec import ModelSpec, Recomputation
from zeromesh.parallel import Parallel
from zeromesh.planner.bounds import Bounds
from zeromesh.planner.evaluate import Candidate, Estimate, Evaluator
from zeromesh.planner.settings import Setting, screened, settings_of
from zeromesh.planner.space import HOSTS, Block, Integers, Space, Splits, hosted_kinds, shares_of
from zeromesh.planner.time_bound import Floats
from zeromesh.planner.workload import Workload
from zeromesh.progress import note
from zeromesh.simulator.mechanics import Mechanics, find_engine
from zeromesh.simulator.run import DEFAULT_MARGIN, without_host
from zeromesh.strategy import Stage, Strategy
from zeromesh.strategy.collective import AUTO, collectives, find_collective

Wires = Literal["lossless", "any"]
Hosts = Literal["auto", "any", "none"]
Refuses = Callable[[Strategy, Parallel], InputError | None]
"""Returns the reason why another engine cannot run a layout; None if it can."""

ANY_WIRES = ("", "int8/", "/int4", "int8/int4")
"""Wires tried on each level under `any`: those of ZeRO++ (arXiv 2306.10209), each half on its own."""

_FRONT_PER_BLOCK = 4
"""Points of the memory-time front that one block, micro-batch and recomputation may propose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to search.

    Wires `any` also tries quantised wires, which change the trained values; with more than two levels, only on unsplit
    ones. At most `max_simulations` candidates are simulated for each kind of collective and stage of the host; None:
    as many as it takes to prove the optimum.
    """

    splits: Splits = "once"  # how often a level may be cut
    wires: Wires = "lossless"
    collective: str = "auto"  # over several levels, beside one after the other; `auto`: measured on the backend
    max_simulations: int | None = 16
    host: Hosts = "auto"  # `any` also tries every stage of the host's memory, `auto` where nothing fits without
    memory_margin: float = DEFAULT_MARGIN  # share of the device's memory to leave free
    front: int = 8  # points of the memory-time front to simulate


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The result of a search, in numbers of candidates."""

    ranked: tuple[Estimate, ...]  # all that were simulated and fit, fastest first
    searched: int  # before pruning
    pruned_memory: int  # those that cannot fit
    simulated: int
    bound_s: float  # no candidate is faster than this
    rows: tuple[Rows, ...] = field(compare=False, repr=False)  # those that may fit, at the degrees of the best

    __repr__ = short_repr

    def again(self, evaluator: Evaluator, wires: Wires) -> Found:
        """The result with the candidates that have been simulated since."""
        fitting = _fitting(evaluator)
        ranked = [each for each in fitting if wires == "any" or not each.candidate.strategy.quantised]
        bound_s = min(self.bound_s, ranked[0].step_s)
        return replace(self, ranked=tuple(ranked), simulated=len(evaluator.evaluated), bound_s=bound_s)

    @property
    def best(self) -> Estimate:
        return self.ranked[0]

    @property
    def front(self) -> tuple[Estimate, ...]:
        """No other simulated candidate is both smaller and faster; smallest first."""
        front: list[Estimate] = []
        for estimate in self.ranked:
            if not front or estimate.memory_bytes < front[-1].memory_bytes:
                front.append(estimate)
        return tuple(front[::-1])

    @property
    def gap(self) -> float:
        """The share of its step time by which the best may be slower than the optimum."""
        return max(0.0, 1 - self.bound_s / self.best.step_s)


class NothingFitsError(InputError):
    """No candidate fits in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Candidates of one block, micro-batch and recomputation that may fit, as arrays, with lower bounds."""

    space: Space
    setting: Setting
    indices: tuple[Integers, ...]  # by level, of its cuts
    step_s: Floats
    memory: Floats
    parts: Integers
    stages: Integers

    def candidate(self, row: int) -> Candidate:
        return _candidate(self.space, self.setting, [column[row] for column in self.indices], float(self.step_s[row]))


def _candidate(space: Space, setting: Setting, cuts: Sequence[int], bound_s: float) -> Candidate:
    strategy = space.strategy(cuts, setting.bounds.wires)
    strategy = replace(strategy, collective=setting.bounds.collective, host=setting.bounds.host)
    return setting.candidate(strategy, bound_s)


@dataclass(slots=True)
class _Pool:
    """Candidates that may fit, the fronts of their blocks, the smallest of all, and (`crowded`) the candidate that
    needs least of the host's memory among those for which only that is too small."""

    refuses: Refuses | None = None
    refused: InputError | None = None
    rows: list[Rows] = field(default_factory=list)
    front: list[tuple[float, float, Candidate]] = field(default_factory=list)
    searched: int = 0
    pruned: int = 0
    smallest_bytes: float = np.inf
    smallest: Candidate | None = None
    least_host_bytes: float = np.inf
    crowded: Candidate | None = None

    def accepted(self, block: Block, space: Space, bounds: Bounds, parallel: Parallel) -> Block:
        """The layouts that another engine can run: other engines have one stage, or one inside of another."""
        assert self.refuses is not None
        few = np.flatnonzero(block.num_runs() <= 2)
        strategies = (space.strategy([column[row] for column in block.indices], bounds.wires) for row in few)
        refused = [self.refuses(replace(strategy, host=bounds.host), parallel) for strategy in strategies]
        self.refused = self.refused or next(filter(None, refused), None)
        return block.choose(few[np.array([error is None for error in refused], dtype=bool)])

    def by_bound(self) -> Iterator[list[Candidate]]:
        """Candidates by rising bound, in groups a thousandth apart. Within a group, those with fewer parts come first,
        then smaller ones."""
        if not self.rows:
            return
        sizes = [len(rows.step_s) for rows in self.rows]
        source = np.repeat(np.arange(len(sizes)), sizes)
        row = np.concatenate([np.arange(size) for size in sizes])
        bound = np.concatenate([rows.step_s for rows in self.rows])
        memory = np.concatenate([rows.memory for rows in self.rows])
        parts = np.concatenate([rows.parts for rows in self.rows])
        order = np.argsort(bound, kind="stable")
        start = 0
        while start < len(order):
            end = int(np.searchsorted(bound[order], bound[order[start]] * 1.001, side="right"))
            group = order[start:end]
            group = group[np.lexsort((memory[group], parts[group]))]
            yield [self.rows[source[i]].candidate(int(row[i])) for i in group]
            start = end


def search(
    model: ModelSpec,
    cluster: Cluster,
    workload: Workload,
    *,
    options: Options | None = None,
    engine: str | Mechanics = "zeromesh",
    refuses: Refuses | None = None,
) -> tuple[Found, Evaluator]:
    """Searches for the fastest candidate that fits; also returns the evaluator with everything that was simulated.

    Args:
        cluster: cut to the world in use.
        workload: micro-batch and recomputation are searched where they are open.
        refuses: leaves out layouts that another engine cannot run.

    Raises:
        NothingFitsError: no candidate fits in memory.
        InputError: the batch does not divide, or `refuses` leaves no layout.
    """
    options = options or Options()
    constants = default_constants().on(cluster)
    mechanics = find_engine(engine)
    if options.max_simulations is None and not bounded(mechanics):
        raise InputError(
            f"an optimum can be proven for the engine zeromesh alone: the bounds do not hold for {mechanics.name}; "
            "leave out --exact"
        )
    evaluator = Evaluator(model, cluster, workload, engine, constants, options.memory_margin)
    pool = _Pool(refuses=refuses)
    collectives, asked = _collectives(cluster, options), options
    hostless = without_host(workload.fixed(1, Recomputation.NONE), mechanics)
    hostless += ["processors, whose memory is the host's"] if cluster.messages else []
    hosts = HOSTS if options.host == "any" and not hostless else (Stage.ZERO,)
    if options.max_simulations is not None:
        options = replace(options, max_simulations=options.max_simulations * len(collectives) * len(hosts))
    bound_s = best_s = np.inf
    rows: dict[Parallel, tuple[Rows, ...]] = {}
    tried = ANY_WIRES if options.wires == "any" else ("",)
    by_level = [tried if level.size > 1 else ("",) for level in cluster.levels]
    for parallel, least_s in screened(evaluator, hosted=len(hosts) > 1):
        if least_s >= best_s:  # as for all that follow
            bound_s = min(bound_s, least_s)
            break
        pool.rows.clear()
        division = evaluator.division(parallel)
        whole = Space(division.cluster.axes, options.splits if division.splits_freely else "none")
        unsplit = replace(whole, splits="none") if len(cluster.levels) > 2 else whole
        for wires, collective, host in product(product(*by_level), collectives, hosts):
            if host is Stage.ZERO or parallel.pp == 1:
                bounds = evaluator.bounds(wires, collective, parallel, host)
                _fill(pool, evaluator, *bounds, parallel, unsplit if any(wires) else whole, best_s)
        before_s = best_s
        best_s, left_s = _simulate_in_order(pool, evaluator, options, best_s)
        if best_s < before_s:
            rows = {parallel: tuple(pool.rows)}
        bound_s = min(bound_s, left_s)
    for candidate in _thinned(pool.front, options.front):
        evaluator.estimate(candidate)
    ranked = _fitting(evaluator)
    if not ranked and pool.crowded is not None and refuses is None:
        for host, step in product(HOSTS[1:], ("host", "device")):
            for strategy in shares_of(replace(pool.crowded.strategy, host=host, step=step)):
                candidate = replace(pool.crowded, strategy=strategy)
                if evaluator.has_room(candidate):
                    evaluator.estimate(candidate)
        ranked = _fitting(evaluator)
    if not ranked:
        if options.host == "auto" and not hostless:
            any_host = replace(asked, host="any")
            return search(model, cluster, workload, options=any_host, engine=engine, refuses=refuses)
        if pool.smallest is None:
            assert pool.refused is not None  # nothing else leaves a space empty
            raise pool.refused
        raise NothingFitsError(_nothing_fits(evaluator, pool.smallest, pool.crowded, hostless))
    if not bounded(mechanics):  # by computation, which holds for any engine
        of_bounds = [settings_of(*evaluator.bounds(parallel=each), each) for each, _ in screened(evaluator)]
        bound_s = min(setting.least_s for settings in of_bounds for setting in settings)
    found = Found(
        ranked=tuple(ranked),
        searched=pool.searched,
        pruned_memory=pool.pruned,
        simulated=len(evaluator.evaluated),
        bound_s=min(bound_s, ranked[0].step_s),
        rows=rows.get(ranked[0].candidate.parallel, ()),
    )
    return found, evaluator


def bounded(mechanics: Mechanics) -> bool:
    """Whether the bounds on communication hold: they assume collectives axis by axis, which others may outrun."""
    return mechanics == find_engine("zeromesh")


def _fitting(evaluator: Evaluator) -> list[Estimate]:
    """Simulated candidates that fit, best first."""
    return sorted(filter(evaluator.fits, evaluator.evaluated), key=_rank)


def collective_choices() -> tuple[str, ...]:
    """Valid values of `Options.collective`."""
    return tuple(name for name in collectives() if find_collective(name).by_level)


def _collectives(cluster: Cluster, options: Options) -> tuple[str, ...]:
    """Level by level, and the collectives to try beside it."""
    if sum(level.size > 1 for level in cluster.levels) <= 1:
        return (AUTO,)

    def tried(name: str) -> bool:
        found = find_collective(name)
        asked = cluster.messages if options.collective == AUTO else options.collective == name
        return found.pairs and asked

    return (AUTO, *filter(tried, collectives()))


def _rank(estimate: Estimate) -> tuple[float, int, bool, float]:
    """Fastest first; if equally fast, the one with fewer parts, then with fewer options, then the smaller one."""
    strategy = estimate.candidate.strategy
    options = strategy.collective != AUTO
    return float(f"{estimate.step_s:.9e}"), len(strategy.axes), options, estimate.memory_bytes


def _fill(
    pool: _Pool,
    evaluator: Evaluator,
    bounds: Bounds,
    of_memory: Bounds,
    parallel: Parallel,
    space: Space,
    best_s: float,
) -> None:
    """Adds candidates that may fit in memory and be faster than `best_s`."""
    every = list(settings_of(bounds, of_memory, parallel))
    least = min(every, key=lambda setting: setting.extra_bytes)
    limit_bytes = evaluator.limit_bytes
    for block in space.blocks():
        if bounds.overlapping:
            # Layouts that shard over one level are the same as level by level; with several replicated levels the sums
            # are by level anyway.
            block = block.choose(np.flatnonzero((block.levels_sharded() > 1) & (block.levels_replicated() <= 1)))
        if pool.refuses:
            block = pool.accepted(block, space, bounds, parallel)
        state, host = of_memory.state_bytes(block), of_memory.host_bytes(block)
        pool.searched += len(block) * len(every)
        crowded = np.flatnonzero((host > evaluator.host_limit_bytes) & (state + least.extra_bytes <= limit_bytes))
        if len(crowded) and (least_host := host[crowded].min()) < pool.least_host_bytes:
            pool.least_host_bytes, row = least_host, crowded[host[crowded].argmin()]
            pool.crowded = _candidate(space, least, [column[row] for column in block.indices], 0.0)
        order = np.argsort(state, kind="stable")
        order = order[host[order] <= evaluator.host_limit_bytes]
        pool.pruned += (len(block) - len(order)) * len(every)
        if not len(order):
            continue
        if (smallest := float(state[order[0]]) + least.extra_bytes) < pool.smallest_bytes:
            cuts = [column[order[0]] for column in block.indices]
            pool.smallest_bytes, pool.smallest = smallest, _candidate(space, least, cuts, 0.0)
        fitting = [int(np.searchsorted(state[order], limit_bytes - s.extra_bytes, side="right")) for s in every]
        pool.pruned += len(order) * len(every) - sum(fitting)
        fitting = [count if s.least_s < best_s else 0 for s, count in zip(every, fitting, strict=True)]
        # Sorted by memory, the layouts that fit are a prefix: only these get a bound on time.
        chosen = order[: max(fitting)]
        smaller, memory = block.choose(chosen), state[chosen]
        time, optimizer_s = bounds.time(smaller), bounds.optimizer_s(smaller)
        parts, stages = smaller.num_parts() + hosted_kinds(bounds.host), smaller.num_stages()
        for setting, count in zip(every, fitting, strict=True):
            if count:
                rows = Rows(
                    space=space,
                    setting=setting,
                    indices=tuple(column[:count] for column in smaller.indices),
                    step_s=time.first(count).at(setting.micro_batches, setting.compute, optimizer_s[:count]),
                    memory=memory[:count] + setting.extra_bytes,
                    parts=parts[:count],
                    stages=stages[:count],
                )
                pool.rows.append(rows)
                pool.front += _front_of(rows)


def _front_of(rows: Rows) -> Iterator[tuple[float, float, Candidate]]:
    """Some of the rows that are faster than all smaller ones; rows are sorted by memory."""
    best = np.minimum.accumulate(rows.step_s)
    falls = np.flatnonzero(np.diff(best, prepend=np.inf) < 0)
    some = falls[np.linspace(0, len(falls) - 1, min(_FRONT_PER_BLOCK, len(falls))).astype(int)]
    for row in dict.fromkeys(some.tolist()):
        yield float(rows.memory[row]), float(rows.step_s[row]), rows.candidate(row)


def _simulate_in_order(pool: _Pool, evaluator: Evaluator, options: Options, best_s: float) -> tuple[float, float]:
    """Simulates by rising bound until the optimum is proven or the budget is spent. `best_s` is the best time so far;
    returns the best time now, and the bound that is left."""
    simulated, seen = 0, set[Candidate]()
    for group in pool.by_bound():
        left_s = min(candidate.bound_s for candidate in group)
        for candidate in group:
            if left_s >= best_s:
                return best_s, left_s
            if candidate.bound_s >= best_s or candidate in seen:  # stage 0 has no use for a wire of parameters
                continue
            seen.add(candidate)
            if options.max_simulations is not None and simulated >= options.max_simulations and best_s < np.inf:
                return best_s, left_s
            estimate = evaluator.estimate_steps(candidate, streamed=pool.refuses is None)
            simulated += 1
            if evaluator.fits(estimate):
                best_s = min(best_s, estimate.step_s)
            note(f"{simulated:,} simulated, at most {max(0.0, 1 - left_s / best_s):.1%} from the fastest")
    return best_s, best_s


def _thinned(rows: list[tuple[float, float, Candidate]], count: int) -> list[Candidate]:
    """`count` candidates, spread over memory, among those that no other beats in both bounds."""
    front: list[tuple[float, float, Candidate]] = []
    for row in sorted(rows, key=lambda row: row[:2]):
        if not front or row[1] < front[-1][1]:
            front.append(row)
    places = np.linspace(0, len(front) - 1, min(count, len(front))).astype(int)
    return [front[place][2] for place in dict.fromkeys(places.tolist())]


def _nothing_fits(evaluator: Evaluator, smallest: Candidate, crowded: Candidate | None, hostless: Sequence[str]) -> str:
    simulation = evaluator.simulation(smallest)
    memory, limit = simulation.memory, evaluator.limit_bytes
    name, device = evaluator.model.name, evaluator.cluster.device.name
    sizes = dict(evaluator.division(smallest.parallel).cluster.axes)
    # More devices would be members of the outermost level, which divide only the state that it shards.
    *_, outer = (Stage.THREE, *(term.stage for term in smallest.strategy.axes if sizes[term.name] > 1))
    shards = outer.shards_params * memory.params + outer.shards_grads * memory.grads
    shards += outer.shards_states * memory.optimizer
    fixed = memory.total - shards
    sharded = shards * evaluator.cluster.world
    if fixed < limit:
        world = int(np.ceil(sharded / (limit - fixed)))
        inner = evaluator.cluster.members_below(len(evaluator.cluster.levels) - 1)
        world = -(-world // inner) * inner
        remedy = f"about {world} devices of this kind would do"
    else:
        remedy = (
            f"no number of devices would do: {fixed / 1e9:.1f} GB of it are the same on any number of them; shorten "
            "the sequence, take a device with more memory or cut the model (--tp, --pp, or --space full)"
        )
    unpredicted = [f"shards in the host's memory are not searched for {' and '.join(hostless)}"] if hostless else []
    remedies = [remedy, *map(str, simulation.owners), *unpredicted]
    if crowded is not None:
        needed, there = evaluator.simulation(crowded).machine_memory_bytes, evaluator.cluster.host_limit_bytes
        remedies.append(
            f"{crowded.strategy} would fit with {needed / 1e9:.1f} GB of a machine's memory, of which "
            f"{there / 1e9:.1f} GB are usable ({HOST_SHARE:.0%} of {there / HOST_SHARE / 1e9:.0f} GB)"
        )
    return (
        f"{name} fits on {evaluator.cluster.world} x {device} under no strategy: the smallest is {smallest} with "
        f"{memory.total / 1e9:.1f} GB per device, and {limit / 1e9:.1f} GB are usable "
        f"({evaluator.memory_margin:.0%} of the memory is left free); {'; '.join(remedies)}"
    )
