"""The exceptions of zeromesh, and clauses of their messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence, Sized
from dataclasses import fields
from typing import Any


class ZeromeshError(Exception):
    """Base of every error that zeromesh raises on purpose."""


class InputError(ZeromeshError, ValueError):
    """The user's input is wrong; the message names a remedy. The command line prints it and exits with 2."""


class NotationError(InputError):
    """A strategy's text does not parse, or the stages it names cannot be combined."""


class MeshError(InputError):
    """A strategy does not fit the mesh, or the mesh does not fit the world."""


class ClusterError(InputError):
    """A cluster preset or TOML file is unknown or invalid."""


class ModelError(InputError):
    """A model description is invalid, or a module cannot be sharded as asked."""


class ConfigError(InputError):
    """A training configuration has an unknown key or an invalid value."""


class CheckpointError(InputError):
    """A checkpoint is damaged, incomplete, or belongs to another model."""


class MeasurementError(InputError):
    """A measurement that cannot be made here, or whose noise is too high to be trusted."""


class OptimizerError(ZeromeshError, RuntimeError):
    """An optimizer, a clip or a gradient scaler would compute wrong numbers on sharded parameters."""


class CommunicationError(ZeromeshError, RuntimeError):
    """A collective failed or did not end within its timeout; names rank, operation, unit and axis."""


class NonFiniteError(ZeromeshError, RuntimeError):
    """A run stopped at a loss or gradient that is NaN or infinite."""


class RanksFailedError(ZeromeshError, RuntimeError):
    """Ranks that were started from here failed, or were ended at their timeout."""


class MismatchError(ZeromeshError, RuntimeError):
    """Ranks that must agree do not: on strategy, model, order of units, or replicas."""


class InternalError(ZeromeshError, RuntimeError):
    """An invariant of zeromesh's own does not hold: a bug in zeromesh."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A clause that names the known spellings nearest to `name`, or all of them if none is near.

    >>> nearest("lama-7b", ["llama-7b", "gpt-20b"])
    'did you mean llama-7b?'
    >>> nearest("zzz", ["a", "b"])
    'known: a, b'
    """
    names = sorted(known)
    return _did_you_mean(name, names) or f"known: {', '.join(names)}"


def one_of(value: str, known: Iterable[str]) -> str:
    """Text for after "must be": the known values, the given one, and a near one.

    >>> one_of("ful", ["none", "full"])
    "one of none, full; got 'ful': did you mean full?"
    >>> one_of("x", ["none", "full"])
    "one of none, full; got 'x'"
    """
    names = list(known)
    close = _did_you_mean(value, names)
    return f"one of {', '.join(names)}; got {value!r}" + (f": {close}" if close else "")


def _did_you_mean(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    return f"did you mean {' or '.join(close)}?" if close else ""


def short_repr(value: Any) -> str:
    """A dataclass as text, for `__repr__`: its own `str`, or the fields that differ from their defaults. Of long
    values, such as a trace's events, it shows the number."""
    name = type(value).__name__
    if "__str__" in vars(type(value)):
        return f"{name}({str(value)!r})"
    found = {each.name: (getattr(value, each.name), each.default) for each in fields(value) if each.repr}
    return f"{name}({', '.join(f'{key}={_short(own)}' for key, (own, usual) in found.items() if own is not usual)})"


def _short(value: Any) -> str:
    many = isinstance(value, Sized) and not isinstance(value, str)
    if many and (len(value) > 4 or len(repr(value)) > 100):
        return f"<{len(value)} items>"
    text = f"{value:.6g}" if isinstance(value, float) else repr(value)
    return text if len(text) <= 100 else f"<{type(value).__name__}>"
