"""No docstring or comment begins with "Of" or "What": its subject would be missing; and none in the core says "what":
the noun that it stands for is plainer. Run by `make check`."""

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
FOLDERS = ("src", "bench", "benchmarks", "examples", "lab", "tools", "validation")
CORE = tuple(f"src/zeromesh/{room}/" for room in ("strategy", "schedule", "comm", "collectives", "engine"))
BEGINNING = re.compile(r"(?:#\s*)?(?:Of|What)\b")
ANYWHERE = re.compile(r"\bwhat(?:ever)?\b", re.IGNORECASE)


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring and comment."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value.strip()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def main() -> int:
    listed = subprocess.run(["git", "ls-files", *FOLDERS], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    wrong = [
        f"{name}:{line}: {text.splitlines()[0]}"
        for name in listed.splitlines()
        if name.endswith(".py")
        for line, text in texts((ROOT / name).read_text())
        if BEGINNING.match(text) or (name.startswith(CORE) and ANYWHERE.search(text))
    ]
    print("\n".join([*wrong, f"docstrings and comments: {len(wrong)} to rewrite"]))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
