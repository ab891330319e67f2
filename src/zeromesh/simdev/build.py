"""Compiles the device, once for each version of torch and of its sources, and loads it.

The result lies in torch's cache of extensions (`TORCH_EXTENSIONS_DIR`). Its name is made from torch's version and the
sources, so another torch builds another one.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import torch

from zeromesh.errors import InputError

T = TypeVar("T")

SOURCES = Path(__file__).parent / "native"
FLAGS = ("-O1", "-DNDEBUG")
"""Kernels are torch's own, so -O1 suffices, which compiles in two thirds of the time of -O2. Without NDEBUG, some of
torch's classes would have another layout than in torch itself."""

DONE = "done"
"""A file beside a complete library: linking may be interrupted."""


@functools.cache
def native() -> Any:
    """Returns the compiled device of this process. Raises InputError if there is no compiler or ninja, or torch is not
    the version that it was written for."""
    directory = _directory()
    directory.mkdir(parents=True, exist_ok=True)
    with _alone(directory / "in-use"):
        if (directory / DONE).exists():
            return _load(directory.name, directory / f"{directory.name}.so")
        built = _build(directory)
        (directory / DONE).touch()
        return built


def as_value(kind: type[T], found: Any) -> T:
    """Converts one of the device's structures to the dataclass `kind`, which has fields of the same names."""
    return kind(**{field.name: getattr(found, field.name) for field in fields(kind)})  # type: ignore[arg-type]


def missing() -> str | None:
    """Returns a sentence on missing requirements for building the device; None if none is, or it is built."""
    if (_directory() / DONE).exists():
        return None
    needed = (("a C++ compiler (g++ or clang++)", _compiler()), ("ninja", _ninja()))
    lacking = [name for name, found in needed if not found]
    if not lacking:
        return None
    return (
        f"the simulated device is compiled on first use, which needs {' and '.join(lacking)}: install "
        f"{'it' if len(lacking) == 1 else 'them'} (Debian: apt install g++ ninja-build; ninja also: pip install ninja)"
    )


def _directory() -> Path:
    parts = [torch.__version__, sysconfig.get_config_var("EXT_SUFFIX"), *FLAGS]
    digest = hashlib.sha256("\n".join(map(str, parts)).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions"
    return Path(root) / f"zeromesh_simdev_{digest.hexdigest()[:16]}"


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Lets one process in at a time. The kernel releases the lock when a process is killed."""
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "c++"))


def _ninja() -> str | None:
    """Finds ninja; pip installs it beside the interpreter, which may not be on PATH."""
    return shutil.which("ninja", path=os.pathsep.join([os.environ.get("PATH", ""), str(Path(sys.executable).parent)]))


def _build(directory: Path) -> Any:
    wrong = missing()
    if wrong is not None:
        raise InputError(wrong)
    from torch.utils import cpp_extension  # slow to import, and requires setuptools

    before = os.environ.get("PATH", "")
    os.environ["PATH"] = os.pathsep.join([before, str(Path(sys.executable).parent)])
    (directory / "lock").unlink(missing_ok=True)  # torch's own lock, left by a build that was killed
    try:
        return cpp_extension.load(
            name=directory.name,
            sources=[str(SOURCES / "device.cc")],
            extra_cflags=list(FLAGS),
            build_directory=str(directory),
        )
    except RuntimeError as error:
        raise InputError(
            f"the simulated device does not compile with torch {torch.__version__}: use a torch that docs/support.md "
            f"lists. {error}"
        ) from error
    finally:
        os.environ["PATH"] = before


def _load(name: str, library: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
