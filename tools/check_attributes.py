"""Finds attributes of the core's objects that are written outside of the module of their class.

State that several modules write has no owner, and no place says when it changes: pass a value, or call a method. The
script does not know types. Inside the core, a write counts if any of the core's mutable classes has a field of that
name. Elsewhere it counts if no other class of the library has such a field, or if the object's name is in `NAMES`.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src/zeromesh"
CORE = tuple(SOURCE / name for name in ("strategy", "schedule", "engine", "comm"))

NAMES = {"engine", "interpreter", "backend", "group", "groups", "channel", "progress"}

FOREIGN = {"ctx", "_thread"}
"""Objects of autograd and Python, on which any module may write."""

TORCHS = {"forward", "grad"}
"""Fields of these names exist on tensors and modules as well."""


def fields(tree: ast.AST) -> Iterator[str]:
    """Yields the fields of classes that are not frozen: declared in the class, or written to `self`."""
    for kind in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        if not any("frozen=True" in ast.unparse(decorator) for decorator in kind.decorator_list):
            yield from (
                n.target.id for n in kind.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
            )
            yield from (node.attr for node in writes(kind) if ast.unparse(node.value) == "self")


def writes(tree: ast.AST) -> Iterator[ast.Attribute]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            yield node


def main() -> int:
    """Prints each write that it finds; returns their number."""
    trees = {path: ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}
    owners: dict[bool, dict[str, set[Path]]] = {True: defaultdict(set), False: defaultdict(set)}
    for path, tree in trees.items():
        for name in fields(tree):
            owners[path.parent in CORE][name].add(path)
    count = 0
    for path, tree in trees.items():
        for node in writes(tree):
            core, others = owners[True].get(node.attr, set()), owners[False].get(node.attr, set())
            receiver = ast.unparse(node.value)
            named = receiver.split(".")[-1].split("[")[0].lstrip("_") in NAMES
            from_outside = path not in core and (path.parent in CORE or not others)
            exempt = receiver in {"self", "cls", *FOREIGN} or node.attr in TORCHS
            if core and not exempt and (named or from_outside):
                fields_of = ", ".join(str(each.relative_to(ROOT)) for each in core)
                print(f"{path.relative_to(ROOT)}:{node.lineno}: {receiver}.{node.attr} is a field of {fields_of}")
                count += 1
    return count


if __name__ == "__main__":
    sys.exit(min(main(), 1))
