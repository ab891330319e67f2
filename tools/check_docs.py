"""Runs the documentation's Python blocks, console blocks and doctests; follows every relative link.

In README.md, CONTRIBUTING.md, CHANGELOG.md, docs/**/*.md and the README.md of folders beside src/:

- the ```python blocks of one file run in order in one process, in an empty directory; the process is forked from one
  that has already imported the slow modules;
- in a ```console block each line after ``$ `` that starts with ``zeromesh`` runs there as well and must exit with 0;
- a block after the comment ``<!-- not run: REASON -->`` is left out, and the reason is printed;
- a link to a file, or to a heading of one, must exist.

Then the doctests of src/, tools/ and lab/ run under pytest.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK_TIMEOUT_S = 300
FORKS = get_context("forkserver")
FORKS.set_forkserver_preload(["torch._dynamo", "transformers.trainer", "zeromesh.engine.api"])
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```\s*$", re.MULTILINE | re.DOTALL)
SKIP = re.compile(r"<!--\s*not run:\s*((?:(?!-->).)+?)\s*-->\s*\Z", re.DOTALL)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+\s+(.*?)\s*$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One fenced block: its language, its text, and the reason if it is not run."""

    language: str
    text: str
    skip_reason: str | None
    line: int


def blocks(page: str) -> Iterator[Block]:
    """Yields the fenced blocks of a Markdown page, in order."""
    for match in FENCE.finditer(page):
        skip = SKIP.search(page[: match.start()].rstrip())
        yield Block(
            language=match[1],
            text=match[2],
            skip_reason=skip[1] if skip else None,
            line=page.count("\n", 0, match.start()) + 1,
        )


def anchor(heading: str) -> str:
    """Returns the name that GitHub gives to a heading.

    >>> anchor("Two commands, `make` and more")
    'two-commands-make-and-more'
    """
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def broken_links(path: Path, page: str) -> Iterator[str]:
    """Yields the relative links of a page whose file or heading does not exist."""
    for match in LINK.finditer(FENCE.sub("", page)):
        target = match[1] or match[2]
        if re.match(r"[a-z]+:", target):
            continue
        name, _, fragment = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        if not file.exists():
            yield f"{path.relative_to(ROOT)}: link to {target}: no such file"
        elif fragment and fragment not in {anchor(text) for text in HEADING.findall(file.read_text())}:
            yield f"{path.relative_to(ROOT)}: link to {target}: no such heading"


def execute(python: str, output: Path) -> None:
    """Runs a page's Python in this process, which was forked for it."""
    os.chdir(output.parent)
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    exec(compile(python, "page", "exec"), {"__name__": "__main__"})


def python_failure(python: str, directory: Path) -> str:
    """Returns the output of a page's Python if it failed, else an empty string."""
    output = directory / ".output"
    process = FORKS.Process(target=execute, args=(python, output))
    process.start()
    process.join(BLOCK_TIMEOUT_S)
    if process.exitcode is None:
        process.kill()
    return "" if process.exitcode == 0 else f"exit {process.exitcode} from\n{python}\n{output.read_text()}"


def commands(page_blocks: list[Block]) -> Iterator[list[str]]:
    for block in page_blocks:
        if block.language == "console":
            for line in block.text.splitlines():
                if line.startswith("$ zeromesh"):
                    yield shlex.split(line.removeprefix("$ "))


def failures(path: Path) -> Iterator[str]:
    """Yields everything wrong with one page."""
    page = path.read_text()
    yield from broken_links(path, page)
    runnable = []
    for block in blocks(page):
        if block.language in ("python", "console") and block.skip_reason:
            print(f"{path.relative_to(ROOT)}:{block.line}: not run: {block.skip_reason}")
        else:
            runnable.append(block)
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    with tempfile.TemporaryDirectory() as directory:
        python = "\n".join(block.text for block in runnable if block.language == "python")
        if python and (failure := python_failure(python, Path(directory))):
            yield f"{path.relative_to(ROOT)}: {failure}"
        for command in commands(runnable):
            try:
                run = subprocess.run(
                    command,
                    cwd=directory,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    text=True,
                    timeout=BLOCK_TIMEOUT_S,
                )
            except subprocess.TimeoutExpired:
                yield f"{path.relative_to(ROOT)}: over {BLOCK_TIMEOUT_S} s: {shlex.join(command)}"
                continue
            if run.returncode != 0:
                yield f"{path.relative_to(ROOT)}: exit {run.returncode} from\n{command[-1]}\n{run.stdout}{run.stderr}"


def doctests() -> int:
    """Runs the doctests; returns pytest's exit status, with 0 for 5 (no doctest at all)."""
    # Modules of optional extras cannot be imported everywhere.
    options = ["--doctest-modules", "--doctest-ignore-import-errors", "--quiet", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, "src", "tools", "lab"]
    status = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, check=False).returncode
    return 0 if status == 5 else status


def main() -> int:
    """Checks every page and prints what is wrong; returns 1 if anything is, or if a doctest fails."""
    named = (
        "README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "bench/README.md",
        "lab/README.md",
        "validation/README.md",
        "benchmarks/results/README.md",
    )
    pages = [*(ROOT / name for name in named), *sorted(ROOT.glob("docs/**/*.md"))]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as several:  # each page runs in its own processes
        tested = several.submit(doctests)
        wrong = [failure for found in several.map(lambda page: list(failures(page)), pages) for failure in found]
    for failure in wrong:
        print(failure, file=sys.stderr)
    print(f"documentation: {len(pages)} pages, {len(wrong)} failures")
    return 1 if tested.result() or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
