"""One rank of a task: `python -m zeromesh.measure.worker DIRECTORY`, started by `launch`."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path

from zeromesh.errors import InputError
from zeromesh.measure.launch import run_task
from zeromesh.measure.records import write_whole
from zeromesh.train.processes import end_process


def main(directory: Path) -> int:
    """Runs this rank's part; rank 0 leaves the result in the directory, a rank that fails its reason."""
    job = json.loads((directory / "job.json").read_text())
    rank = int(os.environ["RANK"])
    try:
        store = directory / "rendezvous" if job["local"] else None
        result = run_task(job["task"], job["options"], job["mesh"], store)
        if rank == 0:
            (directory / "result.json").write_text(json.dumps(result))
    except Exception as error:
        traceback.print_exc()
        failure = {"at_s": time.monotonic(), "is_input": isinstance(error, InputError), "message": str(error)}
        write_whole(directory / f"failure-{rank}.json", json.dumps(failure))
        return 1
    return 0


if __name__ == "__main__":
    end_process(main(Path(sys.argv[1])))
