"""Plants faults in the core, one at a time, and says which of them the tests find.

    python tools/plant_faults.py --faults 60 --seed 0 [TESTS ...]
Each fault changes one place in a copy of the files: it swaps an operator, leaves out a call whose result nobody uses,
or changes an index or a dim. Then pytest runs until the first failure. A run that does not end counts as found. Without
TESTS, each package of the core has its own tests, the cheapest first.
"""

from __future__ import annotations

import argparse
import ast
import copy
import itertools
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = {
    "strategy": ("tests/pure/strategy", "tests/pure/schedule", "tests/dist/engine"),
    "schedule": ("tests/pure/schedule", "tests/local/engine", "tests/dist/engine", "tests/dist/features"),
    "engine": ("tests/local/engine", "tests/dist/engine", "tests/dist/features", "tests/dist/parallel"),
    "comm": ("tests/local/comm", "tests/dist/comm", "tests/dist/engine"),
}
SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One place of one file, and the text that replaces it."""

    kind: str
    file: Path  # relative to the root
    node: ast.expr
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.node.lineno}: {self.kind}: {ast.unparse(self.node)} -> {self.text}"

    def plant(self, source: bytes) -> bytes:
        starts = [0, *itertools.accumulate(map(len, source.splitlines(keepends=True)))]
        begin = starts[self.node.lineno - 1] + self.node.col_offset
        end = starts[(self.node.end_lineno or 0) - 1] + (self.node.end_col_offset or 0)
        return source[:begin] + self.text.encode() + source[end:]


def swapped(node: ast.expr) -> ast.expr | None:
    """Returns the expression with its operator swapped, or None if it has no operator of `SWAPPED`."""
    if isinstance(made := copy.deepcopy(node), ast.Compare) and type(made.ops[0]) in SWAPPED:
        made.ops[0] = SWAPPED[type(made.ops[0])]()  # type: ignore[call-overload]  # an operator of comparison
    elif isinstance(made, ast.BinOp | ast.BoolOp) and type(made.op) in SWAPPED:
        made.op = SWAPPED[type(made.op)]()  # type: ignore[assignment]  # of the same kind
    return None if ast.dump(made) == ast.dump(node) else made


def places(node: ast.AST, inside: bool = False) -> Iterator[tuple[str, ast.expr, str]]:
    """Yields kind, place and new text of each fault inside a function, except in messages, annotations and asserts."""
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr):
        return
    if inside and isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "call", node.value, "None"
    if inside and isinstance(node, ast.Subscript) and type(number := getattr(node.slice, "value", None)) is int:
        yield "index", node.slice, str(number + 1)
    if (
        inside
        and isinstance(node, ast.keyword)
        and node.arg in ("dim", "axis")
        and isinstance(node.value, ast.Constant)
    ):
        yield "index", node.value, "1" if node.value.value == 0 else "0"
    if inside and isinstance(node, ast.expr) and (made := swapped(node)) is not None:
        yield "operator", node, f"({ast.unparse(made)})"
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns", "decorator_list"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from places(child, inside or (isinstance(node, ast.FunctionDef) and name == "body"))


def faults(root: Path) -> Iterator[Fault]:
    """Yields all faults that can be planted in the core."""
    for path in (path for room in TESTS for path in sorted((root / "src/zeromesh" / room).rglob("*.py"))):
        for kind, node, text in places(ast.parse(path.read_bytes())):
            yield Fault(kind=kind, file=path.relative_to(root), node=node, text=text)


def drawn(every: list[Fault], count: int, seed: int) -> list[Fault]:
    """Returns `count` faults, from each kind and package in turn."""
    groups: dict[tuple[str, str], list[Fault]] = {}
    for fault in every:
        groups.setdefault((fault.kind, fault.file.parts[2]), []).append(fault)
    found: list[Fault] = []
    for group in groups.values():
        random.Random(seed).shuffle(group)
    while len(found) < count and any(groups.values()):
        found += [group.pop() for group in groups.values() if group]
    return found[:count]


def passes(root: Path, tests: tuple[str, ...], timeout_s: float) -> bool:
    around = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    around["PYTHONPATH"] = str(root / "src")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    nothing = subprocess.DEVNULL
    try:  # ranks die with the session that started them
        return (
            subprocess.run(command, cwd=root, env=around, stdin=nothing, stdout=nothing, timeout=timeout_s).returncode
            == 0
        )
    except subprocess.TimeoutExpired:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("tests", nargs="*", help="of every fault; without: those of its room")
    parser.add_argument("--faults", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout-s", type=float, default=900.0, help="of one run of the tests")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="zeromesh-faults-") as directory:
        root, count = Path(directory), 0
        shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns(".*", "build", "runs"), dirs_exist_ok=True)
        chosen = {room: tuple(given.tests) or tests for room, tests in TESTS.items()}
        if wrong := [tests for tests in set(chosen.values()) if not passes(root, tests, given.timeout_s)]:
            sys.exit(f"these fail without a fault, so they would find every one: {wrong}")
        for fault in drawn(list(faults(root)), given.faults, given.seed):
            path = root / fault.file
            source = path.read_bytes()
            path.write_bytes(fault.plant(source))
            found = not passes(root, chosen[fault.file.parts[2]], given.timeout_s)
            path.write_bytes(source)
            count += found
            print("found    " if found else "NOT found", fault, flush=True)
    print(f"{count} of {given.faults} found")


if __name__ == "__main__":
    main()
