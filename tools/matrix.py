"""Runs tests under versions other than those of constraints.txt, and records the runs in docs/support.md.

    python tools/matrix.py newest oldest        # the short set of tests; or: make matrix SETS="newest oldest"
    python tools/matrix.py newest --tests tests/local tests/dist/features

Each set of versions gets an environment in build/matrix, of up to 7 GB if torch comes with CUDA. An existing
environment is used again. A new row of the page replaces one of the same versions and tests.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "support.md"
SHORT = "@tests/smoke.txt"
LIBRARIES = ("transformers", "accelerate", "peft", "trl", "lightning")

# A version of None leaves the choice to pip: CUDA builds of torch require the Triton that they were built with.
NEWEST: dict[str, str | None] = {"transformers": "5.24.0", "triton": None}
SETS: dict[str, dict[str, str | None]] = {
    "pinned": {},
    "oldest": {
        "torch": "2.11.0",
        "transformers": "5.22.2",
        "accelerate": "1.14.0",
        "peft": "0.20.0",
        "trl": "1.14.2",
        "lightning": "2.5.6",
        "triton": None,
    },
    "before": NEWEST | {"torch": "2.14.1"},
    "newest": NEWEST | {"torch": "2.15.0"},
}


def constrained(pinned: str, versions: dict[str, str | None]) -> str:
    """Returns the lines of constraints.txt with some versions replaced."""
    kept = [line for line in pinned.splitlines() if line.partition("==")[0] not in versions]
    return "\n".join([*kept, *(f"{name}=={version}" for name, version in versions.items() if version)]) + "\n"


def environment(name: str, directory: Path) -> Path:
    """Makes the environment of a set, and returns its interpreter."""
    venv = directory / name
    venv.mkdir(parents=True, exist_ok=True)
    constraints = venv / "constraints.txt"
    constraints.write_text(constrained((ROOT / "constraints.txt").read_text(), SETS[name]))
    subprocess.run([ROOT / "tools" / "venv.sh", venv, constraints], check=True)
    return venv / "bin" / "python"


def cells(python: Path, tests: Sequence[str]) -> list[str]:
    """Runs the tests, and returns a row of the page."""
    ask = f"import platform, importlib.metadata as m; print(platform.python_version(), *map(m.version, {LIBRARIES}))"
    command = [str(python), "-c", f"import torch; print(torch.__version__); {ask}"]
    versions = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()
    print(" ".join(versions), flush=True)
    # Other versions of the libraries warn, also of each other.
    around = os.environ | {"ZEROMESH_TEST_WARNINGS": "default"}
    command = [str(python), "-m", "pytest", "-q", "-o", "filterwarnings=default", *tests]
    done = subprocess.Popen(command, cwd=ROOT, env=around, stdout=subprocess.PIPE, text=True)
    assert done.stdout is not None
    last = ""
    for last in done.stdout:  # the last line is the summary
        print(last, end="", flush=True)
    if done.wait() not in (0, 1):
        raise SystemExit(f"pytest ended with {done.returncode}: no row was written")
    counts = ", ".join(re.findall(r"\d+ (?:passed|failed|skipped|errors?)", last))
    return [*versions, " ".join(tests), counts, datetime.now(UTC).date().isoformat()]


def with_row(page: str, row: Sequence[str]) -> str:
    """Returns the page with the row, which replaces one with the same versions and tests."""
    lines = page.splitlines()
    rule = next(index for index, line in enumerate(lines) if line.startswith("|---"))
    end = next((index for index in range(rule, len(lines)) if not lines[index].startswith("|")), len(lines))
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[rule + 1 : end]]
    rows = sorted([other for other in rows if other[:-2] != list(row[:-2])] + [list(row)])
    return "\n".join([*lines[: rule + 1], *(f"| {' | '.join(other)} |" for other in rows), *lines[end:]]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="+", choices=SETS)
    parser.add_argument("--tests", nargs="+", default=[SHORT], help="what pytest is given")
    parser.add_argument("--directory", type=Path, default=ROOT / "build" / "matrix", help="of the environments")
    options = parser.parse_args()
    for name in options.sets:
        row = cells(environment(name, options.directory.resolve()), options.tests)
        PAGE.write_text(with_row(PAGE.read_text(), row))


if __name__ == "__main__":
    main()
