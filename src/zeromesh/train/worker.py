"""One local rank: `python -m zeromesh.train.worker DIRECTORY`, started by `launch`."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from pathlib import Path

from zeromesh.train.config import TrainConfig
from zeromesh.train.environment import Launched
from zeromesh.train.preemption import noticing_sigterm
from zeromesh.train.processes import EXIT_PREEMPTED, Failure, end_process


def _end_with_parent() -> None:
    """The parent holds the other end of stdin and writes nothing: end of file means that it is gone."""
    sys.stdin.buffer.read()
    os._exit(1)


def main(directory: Path) -> int:
    """Run this rank; a failure is written to the directory for the parent to report."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Ctrl-C reaches all processes of the terminal; the parent decides what to do about it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with noticing_sigterm():
            from zeromesh.train.loop import run_training
            from zeromesh.train.ranks import join_ranks

            config = TrainConfig.model_validate_json((directory / "config.json").read_text())
            with join_ranks(config.run, config.mesh, directory / "rendezvous", Launched.of(os.environ)) as ranks:
                finished = run_training(config, ranks)
    except Exception as error:
        Failure.now(int(os.environ["RANK"]), error, traceback.format_exc()).write(directory)
        return 1
    return 0 if finished else EXIT_PREEMPTED


if __name__ == "__main__":
    end_process(main(Path(sys.argv[1])))
