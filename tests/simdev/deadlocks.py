"""Whether collectives can wait for each other for ever, under either order of launch."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from zeromesh.simdev.device import LaunchOrder

Launch = tuple[str, int]
"""The communicator, by a name that its ranks share and no others, and the stream."""


def may_hang(programs: Sequence[Sequence[Launch]], order: LaunchOrder, room: int) -> bool:
    """Whether ranks may come to a point where each waits for another.

    A collective has begun on a rank when its kernel has a place there, and leaves it when it has begun on all ranks of
    its communicator. It comes after those before it in its stream.

    Args:
        programs: of each rank, in the order in which its host launches.
        order: in "implicit", each begins after all that were launched before it.
        room: kernels that a device has a place for at once.
    """
    where, everywhere = _numbered(programs)
    first = frozenset[tuple[int, int]]()
    todo, seen = [first], {first}
    # Only in a device that is full can the choice of one rule another out: else one way shows all.
    streams = max(len({stream for _, stream in program}) for program in programs)
    one_way = order == "implicit" or room >= streams
    while todo:
        begun = todo.pop()
        over = {rank_index for key, ranks in everywhere.items() if ranks <= begun for rank_index in ranks}
        choices = list[tuple[int, int]]()
        for rank, program in enumerate(programs):
            running = sum((rank, i) in begun and (rank, i) not in over for i in range(len(program)))
            left = [i for i in range(len(program)) if (rank, i) not in begun]
            for index in left[:1] if order == "implicit" else left:
                before = (i for i in range(index) if program[i][1] == program[index][1])
                if running < room and all((rank, i) in over for i in before):
                    choices.append((rank, index))
        if not choices and len(begun) < len(where):
            return True
        for choice in choices[:1] if one_way else choices:
            state = begun | {choice}
            if state not in seen:
                seen.add(state)
                todo.append(state)
    return False


def _numbered(
    programs: Sequence[Sequence[Launch]],
) -> tuple[list[tuple[int, int]], dict[tuple[str, int], set[tuple[int, int]]]]:
    """Every launch, as rank and index; and those that are one collective, the n-th of its communicator."""
    where, everywhere = list[tuple[int, int]](), defaultdict[tuple[str, int], set[tuple[int, int]]](set)
    for rank, program in enumerate(programs):
        counts = Counter[str]()
        for index, (communicator, _) in enumerate(program):
            where.append((rank, index))
            everywhere[communicator, counts[communicator]].add((rank, index))
            counts[communicator] += 1
    return where, everywhere
