"""How a run of local processes ended: the first failure among them is what is reported. Torch-free."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from zeromesh.errors import InputError
from zeromesh.launch.failure import Failure, report
from zeromesh.launch.processes import EXIT_PREEMPTED, RankResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a run of local processes ended.

    Args:
        code: the exit code.
        reason: for a person, where the code is 1.
        again: whether another start may go better.
    """

    code: int
    reason: str = ""
    again: bool = False


def verdict(results: Sequence[RankResult], failures: Sequence[Failure], *, preempted: bool = False) -> Ending:
    """How the run ended, and why.

    Args:
        results: of each rank's process.
        failures: the cause first.
        preempted: whether the ranks were told to save and end, and can save.

    Raises:
        InputError: the first failure was one.
    """
    codes = {result.rank: result.returncode for result in results}
    by_themselves = [result for result in results if result.ended_because is None]
    killed = [(result.rank, -result.returncode) for result in by_themselves if result.returncode < 0]
    if killed:
        if preempted and all(number == signal.SIGTERM for _, number in killed):
            return Ending(code=EXIT_PREEMPTED)  # before it had begun to listen, and so before its first step
        return Ending(code=1, reason=_killed(*min(killed)), again=True)
    if failures:
        first, reason = failures[0], report(failures, len(results))
        if first.is_input:
            raise InputError(reason.removeprefix("zeromesh: "))
        return Ending(code=1, reason=reason, again=not first.is_final)
    ended = set(codes.values())
    if ended - {0, EXIT_PREEMPTED}:
        return Ending(code=1, reason=f"zeromesh: ranks ended with {codes} and left no reason", again=True)
    return Ending(code=max(ended))


def _killed(rank: int, number: int) -> str:
    hints = {
        signal.SIGKILL: "; the machine may be out of memory",
        signal.SIGTERM: "; nothing was saved",
    }
    name = signal.Signals(number)
    return f"zeromesh: rank {rank} was ended by {name.name}{hints.get(name, '')}"
