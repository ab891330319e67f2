"""What lives for a step or a backward.

[Note: Lifetimes] What lives for a while is an object, and its end is that the object is dropped:

    Step            from the first backward after a step's gradients were shown to the end of its last backward
    Backward        one run of autograd; inside, one may run that autograd starts (reentrant checkpointing)
    Forward         the interpreter's; as long as a graph may come back to it
    Half            from a backward for the gradients of inputs alone to that for those of parameters

A forward or backward that does not end (an exception, Ctrl-C) calls nothing. Whoever comes next finds its object,
drops it with all that it knew (`give_up`), and begins anew, unless sums of earlier micro-batches are torn by it: then
everything raises until `zm.zero_grad(model)`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from zeromesh.schedule import Forward


@dataclass(slots=True, eq=False)
class Step:
    """What is known of the step whose gradients are being accumulated: [Note: Lifetimes].

    Args:
        backwards: that have ended.
        weighted: whether its micro-batches have weights; None before the first.
        torn: a backward that did not end has left a part of its micro-batch in sums of others.
        shown: its last backward has ended.
    """

    backwards: int = 0
    weighted: bool | None = None
    torn: bool = False
    shown: bool = False


@dataclass(slots=True, eq=False)
class Backward:
    """One run of autograd: [Note: Lifetimes].

    Args:
        task: autograd's number of it.
        ended: what autograd calls at its end; gone once it has been called, or never will be.
        stale: units that were computed with parameters of an older generation than now, and the oldest of those.
    """

    task: int
    ended: Callable[[], object]
    stale: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Half:
    """What a backward for the gradients of inputs alone knows, and the one for those of parameters has to know.

    Args:
        forwards: that it has reached.
        stale: as of a `Backward`.
    """

    forwards: list[Forward] = field(default_factory=list)
    stale: dict[int, int] = field(default_factory=dict)
