"""One rank of a job: `python -m zeromesh.launch.worker DIRECTORY`, started by way of `job`."""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from zeromesh.files import write_whole
from zeromesh.launch.failure import Failure, end_process
from zeromesh.launch.job import JOB, RENDEZVOUS, RESULT


def main(directory: Path) -> int:
    """Runs this rank's part; rank 0 leaves the result in the directory, a rank that fails its reason."""
    rank = int(os.environ["RANK"])
    job = json.loads((directory / JOB).read_text())
    try:
        result = find_task(job["task"])(directory / RENDEZVOUS if job["local"] else None, **job["options"])
        if rank == 0:
            write_whole(directory / RESULT, json.dumps(result))
    except Exception as error:
        failure = Failure.now(rank, error, traceback.format_exc())
        if job["prints"]:
            print(failure.traceback or failure.message, file=sys.stderr)
        failure.write(directory)
        return 1
    return 0


def find_task(task: str) -> Any:
    """The function that "module:function" names."""
    module, _, function = task.partition(":")
    return getattr(importlib.import_module(module), function)


if __name__ == "__main__":
    if code := main(Path(sys.argv[1])):
        end_process(code)
