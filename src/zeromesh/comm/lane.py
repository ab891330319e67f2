"""Lanes: queues of jobs that run beside the computation, in the order of submission.

    device   a job runs                                   the caller waits
    cpu      in the lane's thread                         until the job has ended
    other    at submit, into the lane's stream,           its current stream waits for an event;
             after the caller's stream's work so far:     the host does not
             [Note: Later]
    inline   at submit, on the caller's own stream        not at all: it has ended (overlap=none)

Memory that a job touches must live until its ticket is waited for, or its lane is closed. The engine's buffers live as
long as the engine and its lanes. A stream's ticket keeps its job, and all that the job refers to, until it is waited
for. So `record_stream`, which delays the allocator's frees, is not needed.

[Note: Later] A stream's job that follows one of the host's threads would keep the caller waiting for that. So it stays
in the lane's queue, with those submitted after it, until one of them is waited for, or `Lane.launch` is called. Its
stream still comes after the caller's work at the time of submission alone. Whether the host's job has ended by then
makes no difference, so ranks that make the same calls launch in the same order.
"""

from __future__ import annotations

import atexit
import os
import queue
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack as untransformed

from zeromesh.errors import CommunicationError

Job = Callable[[], object]

_HOST = torch.device("cpu")

_HIGH = -1
"""A stream's priority, as FSDP2's: where kernels wait for a place on the device, a lane's go first. One that is late
keeps all ranks of its axis waiting."""


class Ticket:
    __slots__ = ("_cause", "_event", "_first", "_index", "_job", "_later", "_pending", "error", "label")

    def __init__(self, label: str) -> None:
        self.label = label
        # Held until the job has ended: cheaper than an Event, and a Ctrl-C gets through.
        self._pending = threading.Lock()
        self._pending.acquire()
        self.error: BaseException | None = None  # the job's own, until somebody has been told
        self._cause: str | None = None
        self._event: torch.Event | None = None
        self._index: int | None = None  # of the device: torch looks one up by its index in half the time
        self._job: Job | None = None
        # While it is not launched, the lane that has it in its queue, and the job that it waits for: [Note: Later].
        self._later: _Stream | None = None
        self._first: Ticket | None = None

    def launched(self) -> bool:
        """Whether the job has ended, or lies in its stream: then a stream waits for it, and not the host."""
        return not self._pending.locked()

    def done(self) -> bool:
        """Whether the job has ended, on the device too."""
        return self.launched() and (self._event is None or self._event.query())

    def wait(self) -> None:
        """The caller's next work comes after the job.

        Raises:
            Exception: the job's own; on the first call only, so that a second wait does not report one fault twice.
        """
        self.end()
        error, self.error = self.error, None
        if error is not None:
            raise error
        self._order()
        self._job = None

    def end(self) -> None:
        """Returns when the job has ended, or lies in its stream."""
        if self._later is not None:
            self._later.launch(self)
        with self._pending:
            pass

    @property
    def follows(self) -> Ticket | None:
        """The host's job that keeps this one from being launched."""
        first: Ticket | None = self
        while first is not None and first._later is not None:
            first = first._first
        return None if first is self else first

    def precede(self) -> None:
        """The calling lane's next work comes after the job. Unlike `wait`, this leaves the job's error and references
        to its own waiter: others may not be past it.

        Raises:
            CommunicationError: the job failed, whether or not somebody has been told already.
        """
        self.end()
        if self._cause is not None:
            raise CommunicationError(f"not run, since what it follows failed: {self._cause}")
        self._order()

    def _order(self) -> None:
        """On the lane's device, which need not be the current one: `Event.wait` would use the current one's stream."""
        if self._event is not None:
            torch.accelerator.current_stream(self._index).wait_event(self._event)

    def _finish(
        self,
        error: BaseException | None = None,
        event: torch.Event | None = None,
        index: int | None = None,
        job: Job | None = None,
    ) -> None:
        self.error, self._event, self._index, self._job = error, event, index, job
        if error is not None:
            text = str(error)
            self._cause = text if self.label and text.startswith(self.label) else f"{self.label or 'a job'}: {text}"
        self._pending.release()


class _Runner:
    """Runs a lane's jobs where they are put. It keeps the text of the first error, and not the error, which would keep
    the job's frames alive."""

    def __init__(self, lane: str, device: torch.device = _HOST) -> None:
        self._lane, self._device = lane, device
        self._cause: str | None = None

    def put(self, job: Job, ticket: Ticket, after: Ticket | None) -> None:
        """`job` waits for `after` by itself."""
        ticket._finish(self.run(job, ticket.label))

    def launch(self, until: Ticket | None = None) -> None:
        """Launches the jobs that wait for others on the host; until one of them, or all."""

    def run(self, job: Job, label: str) -> BaseException | None:
        """Runs a job now; returns the error that it raised, if any."""
        if self._cause is not None:
            return CommunicationError(f"{label or 'a job'} was not run: on lane {self._lane!r}, {self._cause}")
        try:
            # The first takes half the time of `no_grad`; `torch.func` allows no writes to tensors from outside of it.
            with torch.set_grad_enabled(False), untransformed():
                job()
        except BaseException as error:
            self._cause = f"{label or 'an earlier job'} failed before it: {error}"
            if label and isinstance(error, CommunicationError):
                error.args = (f"{label}: {error}",)  # the collective knows its axis; the job, which unit it is for
            return error
        return None

    def synchronize(self) -> None:
        """A thread's job that was waited for has ended; one on the caller's own stream need not have."""
        if self._device.type != "cpu":
            torch.accelerator.current_stream(self._device.index).synchronize()

    def close(self) -> None:
        """Accepts no more jobs."""


class Lane:
    """Runs jobs in order. After a job failed, the lane's later jobs fail at once with the same cause. Dropping the lane
    ends its thread. The end of the process ends it too, after the jobs under way (`drain`)."""

    def __init__(self, name: str, *, device: torch.device, inline: bool = False) -> None:
        self.name = name
        if inline:
            self._runner = _Runner(name, device)
        else:
            self._runner = _Thread(name) if device.type == "cpu" else _Stream(name, device)
        self._finalizer = weakref.finalize(self, self._runner.close)

    def submit(self, job: Job, label: str = "", *, after: Ticket | None = None) -> Ticket:
        """Queues `job`; it runs after all jobs submitted before, and `after` that of another lane. If that one fails,
        this one is not run and fails with the same cause."""
        ticket = Ticket(label)
        job = job if after is None else partial(_after, after, job)
        if not self._finalizer.alive:
            raise CommunicationError(f"lane {self.name!r} is closed; {label or 'a job'} cannot run")
        self._runner.put(job, ticket, after)
        return ticket

    def launch(self) -> None:
        """Jobs that follow one of the host's are launched now, when that has ended: [Note: Later]."""
        self._runner.launch()

    def synchronize(self) -> None:
        """The host comes after the jobs whose tickets have been waited for, before it uses its own memory."""
        self._runner.synchronize()

    def close(self) -> None:
        self._finalizer()


def _after(first: Ticket, job: Job) -> None:
    first.precede()
    job()


class _Thread(_Runner):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._jobs: queue.SimpleQueue[tuple[Job, Ticket] | None] = queue.SimpleQueue()
        # The thread holds the queue alone: neither the lane nor, between jobs, anything a job refers to.
        thread = threading.Thread(target=_work, args=(self._jobs, name), name=f"zeromesh-{name}", daemon=True)
        thread.start()
        _threads[thread] = self._jobs
        self._process = os.getpid()

    def put(self, job: Job, ticket: Ticket, after: Ticket | None) -> None:
        if self._process != os.getpid():
            raise CommunicationError(
                f"{ticket.label or 'a job'} cannot run in a process forked from the one that sharded the model: the "
                f"threads that communicate are not forked with it"
            )
        if after is not None and after._later is not None:
            after.end()  # here, since a stream's jobs are launched by its callers alone
        self._jobs.put((job, ticket))

    def close(self) -> None:
        self._jobs.put(None)


def _work(jobs: queue.SimpleQueue[tuple[Job, Ticket] | None], name: str) -> None:
    runner = _Runner(name)
    while (item := jobs.get()) is not None:
        job, ticket = item
        error = runner.run(job, ticket.label)
        del job, item  # before the ticket says so: whoever waits may drop the model and expect its memory back
        ticket._finish(error)
        del ticket, error


_threads: weakref.WeakKeyDictionary[threading.Thread, queue.SimpleQueue[tuple[Job, Ticket] | None]] = (
    weakref.WeakKeyDictionary()
)
"""Those that are alive, with their queues."""

DRAIN_S = 60.0
"""How long the end of a process waits for jobs under way. A collective that all ranks have issued ends in moments; one
that a dead rank has not issued never ends."""

FAILED_DRAIN_S = 5.0
"""The same where this process ends by an exception, as the other ranks may be waiting for it."""


@atexit.register
def drain() -> None:
    """Waits for jobs under way before the process ends: docs/decisions/0019."""
    longest_s = FAILED_DRAIN_S if hasattr(sys, "last_value") else DRAIN_S
    ends = time.monotonic() + longest_s
    for jobs in list(_threads.values()):
        jobs.put(None)
    late = []
    for thread in list(_threads):
        thread.join(max(0.0, ends - time.monotonic()))
        late += [thread.name] if thread.is_alive() else []
    if late:
        sys.stderr.write(
            f"zeromesh: {', '.join(late)} still waits for other ranks {longest_s:g} s after this one has ended: "
            f"another rank has died, or has not made the same calls; this process ends with exit code 1\n"
        )
        sys.stderr.flush()
        os._exit(1)


os.register_at_fork(after_in_child=_threads.clear)


class _Stream(_Runner):
    def __init__(self, name: str, device: torch.device) -> None:
        super().__init__(name)
        self._stream = torch.Stream(device, priority=_HIGH)
        self._used = False  # since the host has waited for it
        self._later: deque[tuple[Job, Ticket, torch.Event]] = deque()

    def put(self, job: Job, ticket: Ticket, after: Ticket | None) -> None:
        start = torch.accelerator.current_stream(self._stream.device_index).record_event()
        if self._later or (after is not None and after._event is None):
            ticket._later, ticket._first = self, after or self._later[-1][1]
            self._later.append((job, ticket, start))
        else:
            self._launch(job, ticket, start)

    def launch(self, until: Ticket | None = None) -> None:
        while self._later and (until is None or until._later is not None):
            job, ticket, start = self._later[0]
            if ticket._first is not None:
                ticket._first.end()  # a Ctrl-C that ends this leaves the queue as it is
            self._later.popleft()
            ticket._later = ticket._first = None
            self._launch(job, ticket, start)

    def _launch(self, job: Job, ticket: Ticket, start: torch.Event) -> None:
        self._used = True
        self._stream.wait_event(start)
        with self._stream:
            error = self.run(job, ticket.label)
        ticket._finish(error, self._stream.record_event(), self._stream.device_index, job)

    def synchronize(self) -> None:
        if self._used:
            self._stream.synchronize()
        self._used = False

    def close(self) -> None:
        """Orders the caller's stream after the lane's jobs, since memory freed from now on is reused on that stream."""
        for _, ticket, _ in self._later:
            ticket._later = ticket._first = None
            ticket._finish(CommunicationError(f"{ticket.label or 'a job'} was not run: its lane has been closed"))
        self._later.clear()
        torch.accelerator.current_stream(self._stream.device_index).wait_stream(self._stream)
