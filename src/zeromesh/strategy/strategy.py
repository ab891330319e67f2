"""The notation ``node=3,cluster=1``: a ZeRO stage for every axis of the mesh, as a value.

::

    strategy = mix ("|" part ":" mix)*                   the model's, then those of parts of it
    mix      = ("host" share? "=" stage ",")? axis "=" stage wire? ("," axis ...)* (";" option "=" value)*
                                                           innermost axis first
    share    = "[" percent "%]"                            of the model's tensors, the last ones
    part     = pattern of module names | "<" name of a class ">"
    axis     = name | name "[" size "]" | name "[*]"     a size splits a level; [*] is the rest of it
    stage    = "0" | "1" | "2" | "3" | "3k" | "3d" | "3dk" | "3h" | "3dh"            the host's: none that keeps
    wire     = "@" [P] "/" [G ["+ef"]] | "@" P           +ef: error feedback, on a quantised G
    P, G     = dtype | "int8[" block "]" | "int4[" block "]"
    option   = collective=auto|flat|hierarchical|ho_ring, overlap=all|gather|none, prefetch=K, step=host|device
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import groupby, pairwise
from math import prod
from typing import Literal, get_args

from zeromesh.errors import NotationError, nearest, one_of, short_repr
from zeromesh.strategy.collective import AUTO, collectives
from zeromesh.strategy.stage import DEFAULT_WIRE, HOST, Stage, Wire

Overlap = Literal["all", "gather", "none"]
Stepping = Literal["host", "device"]
Split = int | Literal["*"] | None

OVERLAPS: tuple[Overlap, ...] = get_args(Overlap)
STEPPINGS: tuple[Stepping, ...] = get_args(Stepping)
MAX_PREFETCH = 64

_AXIS = re.compile(
    r"(?P<name>[A-Za-z_]\w*)(\[(?P<split>\d{1,9}|\*)\])?=(?P<stage>[^@\s]*)(?:@(?P<wire>[^@]*))?", re.ASCII
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisStage:
    """One term of a strategy."""

    name: str
    stage: Stage
    wire: Wire = DEFAULT_WIRE
    split: Split = None  # None for the whole axis; a size for a part of it; "*" for the rest of it
    # If a whole axis was written as parts with sizes: their product, which the mesh must have. It is not compared.
    spelt: int | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.split, int) and self.split < 1:
            raise NotationError(f"the size of {self.name}[{self.split}] must be at least 1")
        if self.wire.param and not (self.stage.shards_states):
            raise NotationError(
                f"{self}: stage 0 sends no parameters over {self.name}, so a parameter wire has no meaning there; "
                f"for gradients write @/{self.wire.param}"
            )

    def __str__(self) -> str:
        split = "" if self.split is None else f"[{self.split}]"
        return f"{self.name}{split}={self.stage.value}{self.wire}"


_PART = re.compile(r"<\w+>|[\w.*?\[\]!-]+", re.ASCII)
"""As in *.experts, or <MixtralExperts>."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """A ZeRO stage for every mesh axis, innermost first, in normal form.

    It also has the stage of the host's memory (for `percent` of the tensors), the place of the optimizer's step for
    shards on the host (`step`), and the strategies of parts of the model (`parts`, ordered by name). Two spellings of
    one layout are equal, and ``Strategy.parse(str(s)) == s``:

    >>> Strategy.parse("node[4]=3, node[2]=3") == Strategy.parse("node=3")
    True
    >>> str(Strategy.parse("cluster = 3@int8; prefetch=1"))
    'cluster=3@int8/'
    >>> str(Strategy.parse("node=3,cluster=1 | *.experts: expert=1"))
    'node=3,cluster=1 | *.experts: expert=1'

    Raises:
        NotationError: the text does not parse, or the stages cannot be combined.
    """

    axes: tuple[AxisStage, ...]
    collective: str = AUTO
    overlap: Overlap = "all"
    prefetch: int = 1
    step: Stepping = "host"
    host: Stage = Stage.ZERO
    percent: int = 100
    parts: tuple[tuple[str, Strategy], ...] = ()

    __repr__ = short_repr

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", _normal_form(self.axes))
        object.__setattr__(self, "parts", _parts_in_order(self.parts))
        _check_options(self)
        _check_host(self.host, self.percent)
        if self.host is Stage.ZERO or not self.percent:
            object.__setattr__(self, "host", Stage.ZERO)
            object.__setattr__(self, "percent", 100)
            object.__setattr__(self, "step", "host")
        _check_mix(self.axes)

    @classmethod
    def parse(cls, text: str | Strategy, axes: Sequence[str] | None = None) -> Strategy:
        """Parses the notation, or a preset's name (``zero3``, ``hsdp``, ``paro:IIG``, ...).

        Args:
            text: the notation. A preset may carry options: ``hsdp;prefetch=2``. In a part's strategy it stands for one
                of the same axes as the model's.
            axes: names of the mesh's axes, innermost first; needed by presets only.
        """
        if isinstance(text, Strategy):
            return text
        own, *parts = text.split("|")
        body, *options = (part.strip() for part in own.split(";"))
        terms = body
        if body and "=" not in body:
            from zeromesh.strategy.presets import preset_axes  # asked for by name

            terms = preset_axes(body, axes)
        first, *others = terms.split(",") if body else [""]
        host, percent = _host_stage(first)
        stages = [_parse_axis(term) for term in (others if host else [first, *others])] if body else []
        strategy = cls(axes=tuple(stages), host=host or Stage.ZERO, percent=percent)
        parsed = tuple(_parse_part(part, axes) for part in parts)
        return replace(strategy, parts=parsed, **_parse_options(options))  # type: ignore[arg-type]  # checked

    def with_parts(self, parts: Mapping[str, Strategy]) -> Strategy:
        """The same for the model, with these for its parts."""
        return replace(self, parts=tuple(parts.items()))

    @property
    def names(self) -> tuple[str, ...]:
        """Mesh axes, innermost first, each once."""
        return tuple(name for name, _ in groupby(axis.name for axis in self.axes))

    @property
    def hosted(self) -> bool:
        """Whether anything lies in the host's memory, of parts too."""
        own = self.host is not Stage.ZERO or any(axis.stage.hosted for axis in self.axes)
        return own or any(strategy.hosted for _, strategy in self.parts)

    @property
    def quantised(self) -> bool:
        return any(axis.wire.quantised for axis in self.axes)

    def __str__(self) -> str:
        changed = [(key, getattr(self, key)) for key, default in _OPTIONS.items() if getattr(self, key) != default]
        parts = "".join(f" | {name}: {strategy}" for name, strategy in self.parts)
        share = f"[{self.percent}%]" if self.percent < 100 else ""
        host = [] if self.host is Stage.ZERO else [f"{HOST}{share}={self.host.value}"]
        return ",".join([*host, *map(str, self.axes)]) + "".join(f";{key}={value}" for key, value in changed) + parts


def _parse_axis(term: str) -> AxisStage:
    compact = re.sub(r"\s+", "", term)
    match = _AXIS.fullmatch(compact)
    if match is None:
        raise NotationError(
            f"expected axis=stage, as in node=3, node[4]=3, cluster=3k or node=3@int8/int4; got {term.strip()!r}"
        )
    split = match["split"]
    return AxisStage(
        name=match["name"],
        stage=Stage.parse(match["stage"]),
        wire=DEFAULT_WIRE if match["wire"] is None else Wire.parse(match["wire"]),
        split=split if split in (None, "*") else int(split),  # type: ignore[arg-type]  # the pattern allows no other
    )


_HOST = re.compile(rf"{HOST}(\[(?P<size>[^\]]*)\])?=(?P<stage>.*)")


def _host_stage(term: str) -> tuple[Stage | None, int]:
    """The stage and the share in percent that a term gives the host; (None, 100) for any other term."""
    match = _HOST.fullmatch(re.sub(r"\s+", "", term))
    if match is None:
        return None, 100
    size = match["size"]
    if "@" in match["stage"] or not (size is None or re.fullmatch(r"\d{1,3}%", size, re.ASCII)):
        raise NotationError(
            f"the host takes only a stage, optionally for a share of the tensors in whole percent, as in {HOST}=1 or "
            f"{HOST}[50%]=1; got {term.strip()}"
        )
    return Stage.parse(match["stage"]), 100 if size is None else int(size[:-1])


def _check_host(stage: Stage, percent: int) -> None:
    if not 0 <= percent <= 100:
        raise NotationError(f"the host's share must be 0 to 100 %; got {HOST}[{percent}%]={stage.value}")
    if stage.kept:
        plain = stage.value.rstrip("kh")
        less = "host=1" if stage.deferred else "host=2"
        raise NotationError(
            f"{HOST}={stage.value} would take the device memory of {less} and make more copies: write {less}, or "
            f"{HOST}={plain}"
        )


def _parse_part(text: str, axes: Sequence[str] | None) -> tuple[str, Strategy]:
    name, colon, strategy = (each.strip() for each in text.partition(":"))
    if not colon:
        raise NotationError(
            f"expected a part of the model and its strategy after |, as in | *.experts: expert=1; got {text.strip()!r}"
        )
    return name, Strategy.parse(strategy, axes)


def _parts_in_order(parts: Sequence[tuple[str, Strategy]]) -> tuple[tuple[str, Strategy], ...]:
    names = [name for name, _ in parts]
    for name, strategy in parts:
        if _PART.fullmatch(name) is None:
            raise NotationError(
                f"a part is a pattern of module names, as in *.experts, or a class in <>, as in <MixtralExperts>; "
                f"got {name!r}"
            )
        if names.count(name) > 1:
            raise NotationError(f"part {name} is given twice")
        if strategy.parts:
            raise NotationError(f"part {name} has parts of its own: write each part in the model's strategy")
        for option in ("overlap", "prefetch"):
            if getattr(strategy, option) != _OPTIONS[option]:
                raise NotationError(
                    f"{option} applies to the whole step, but part {name} sets its own: set it in the model's strategy"
                )
    return tuple(sorted(parts, key=lambda part: part[0]))


def _parse_options(options: Iterable[str]) -> dict[str, object]:
    parsed: dict[str, object] = {}
    for option in options:
        key, equals, value = (part.strip() for part in option.partition("="))
        if not equals or key not in _OPTIONS:
            raise NotationError(f"expected an option as in ;prefetch=2; got {option!r}: {nearest(key, _OPTIONS)}")
        if key in parsed:
            raise NotationError(f"option {key} is given twice")
        if key == "prefetch" and not (value.isdecimal() and len(value) < 9):
            raise NotationError(f"prefetch must be a whole number of units, as in ;prefetch=2; got {value!r}")
        parsed[key] = int(value) if key == "prefetch" else value
    return parsed


def _check_options(strategy: Strategy) -> None:
    for option, known in (("collective", collectives()), ("overlap", OVERLAPS), ("step", STEPPINGS)):
        if (given := getattr(strategy, option)) not in known:
            raise NotationError(f"{option} must be {one_of(given, known)}")
    if not 0 <= strategy.prefetch <= MAX_PREFETCH:
        raise NotationError(f"prefetch must be 0 to {MAX_PREFETCH} units; got {strategy.prefetch}")


def _normal_form(axes: Sequence[AxisStage]) -> tuple[AxisStage, ...]:
    if not axes:
        raise NotationError("a strategy must name a stage for every mesh axis, as in node=3,cluster=1; got nothing")
    levels = [(name, list(parts)) for name, parts in groupby(axes, key=lambda axis: axis.name)]
    names = [name for name, _ in levels]
    for name in names:
        if names.count(name) > 1:
            raise NotationError(f"axis {name} appears in two places; write the parts of an axis next to each other")
    return tuple(axis for name, parts in levels for axis in _merge_splits(name, parts))


def _merge_splits(name: str, parts: list[AxisStage]) -> Iterator[AxisStage]:
    if len(parts) > 1 and any(part.split is None for part in parts):
        raise NotationError(f"axis {name} is given {len(parts)} stages: write its parts with sizes, as in {name}[4]=3")
    if any(part.split == "*" for part in parts[:-1]):
        raise NotationError(f"{name}[*] is the rest of {name}, so it must be the outermost part of {name}")
    parts = [part for part in parts if part.split != 1] or parts[:1]
    merged = [
        replace(same[0], split=_product([part.split for part in same]))
        for same in (list(group) for _, group in groupby(parts, key=lambda part: (part.stage, part.wire)))
    ]
    # One stage over all of an axis: its size is the mesh's business, so the spelling with sizes is the same layout.
    if len(merged) > 1:
        return iter(merged)
    (whole,) = merged
    return iter([replace(whole, split=None, spelt=whole.split if isinstance(whole.split, int) else whole.spelt)])


def _product(splits: Sequence[Split]) -> Split:
    odd = [split for split in splits if not isinstance(split, int)]
    return odd[0] if odd else prod(split for split in splits if isinstance(split, int))


def _check_mix(axes: Sequence[AxisStage]) -> None:
    two = next((axis for axis in axes if axis.stage is Stage.TWO), None)
    deferred = next((axis for axis in axes if axis.stage.deferred), None)
    if two and deferred:
        raise NotationError(
            f"{two} and {deferred} cannot be combined: gradients would be sharded over {two.name} only, and parameters "
            f"over {deferred.name} only, so neither shard would contain the other; use {deferred.name}=3, or "
            f"{two.name}=1 or 3d"
        )
    misplaced = next((axis for axis in axes if axis.name == HOST), None)
    if misplaced:
        raise NotationError(f"{misplaced} comes after another axis: write the host first, as in {HOST}=1,node=3")
    params = [axis for axis in axes if axis.stage.shards_params]
    places = {axis.stage.hosted: axis for axis in params if axis.stage.kept}
    if len(places) > 1:
        raise NotationError(
            f"{places[False]} keeps its copy on the device and {places[True]} on the host: write both with k, or both "
            f"with h"
        )
    for kept, later in pairwise(sorted(params, key=lambda axis: axis.stage.significance)):
        if kept.stage.kept and not later.stage.kept:
            letter = kept.stage.value[-1]
            raise NotationError(
                f"{kept} is gathered after {later}, so its kept copy would contain the parameters that {later.name} "
                f"releases: write {later.name}={later.stage.value}{letter} as well, or drop the {letter} of {kept.name}"
            )


_OPTIONS = {
    field.name: field.default for field in fields(Strategy) if field.name not in ("axes", "host", "percent", "parts")
}
