"""Finds words that the project does without. Run by `make check`.

No docstring or comment begins with "Of" or "What": its subject would be missing. In `ROOMS` none says "what": the noun
that it stands for is plainer. No identifier is in `OLD`: each of those names had several meanings. Each note that is
referred to is written somewhere."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("src", "bench", "benchmarks", "examples", "lab", "tests", "tools", "validation")
ROOMS = ("src/", "tests/")
"""Folders whose docstrings and comments do not say "what"."""
BEGINNING = re.compile(r"(?:#\s*)?(?:Of|What)\b")
OLD = {
    "Homes": "GradDestinations",
    "Placed": "BufferLayout",
    "Promised": "LazyTensor",
    "promised_of": "lazy_sources",
    "read_promised": "read_lazy",
}
"""Names that are no longer used, and the names that replaced them."""
ANYWHERE = re.compile(r"\bwhat(?:ever)?\b(?!-if)", re.IGNORECASE)
NOTE = re.compile(r"\[Note:\s+([A-Z][^\]]*)\]")
WRITTEN = re.compile(r"^\W*" + NOTE.pattern + r"\s+[A-Z`]", re.MULTILINE)


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Yields line and text of each docstring and comment."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value.strip()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def old_names(source: str) -> Iterator[tuple[int, str]]:
    """Yields line and name of each identifier in `OLD`."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME and token.string in OLD:
            yield token.start[0], f"{token.string}: {OLD[token.string]}"


def main() -> int:
    listed = subprocess.run(["git", "ls-files", *FOLDERS], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    wrong, notes, written = [], dict[str, str](), set[str]()
    for name in (name for name in listed.splitlines() if name.endswith(".py")):
        source = (ROOT / name).read_text()
        found = [
            (line, text.splitlines()[0])
            for line, text in texts(source)
            if BEGINNING.match(text) or (name.startswith(ROOMS) and ANYWHERE.search(text))
        ]
        wrong += [f"{name}:{line}: {text}" for line, text in [*found, *old_names(source)]]
        notes |= {" ".join(note.split()): name for note in NOTE.findall(source)}
        written |= {*WRITTEN.findall(source)}
    wrong += [f"{name}: there is no [Note: {note}]" for note, name in notes.items() if note not in written]
    print("\n".join([*wrong, f"{len(wrong)} to rewrite"]))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
