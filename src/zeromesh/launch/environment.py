"""The launcher's (torchrun's, srun's) description of the run in the environment. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from zeromesh.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """This process as its launcher sees it: over the whole run, and on this machine."""

    rank: int
    world: int
    local_rank: int
    local_world: int

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Self | None:
        """The ranks that torchrun's variables describe; None for a process that was started by hand.

        Raises ConfigError if some are missing or cannot be right, or another launcher has started several processes
        without them."""
        given = [name for name in ("RANK", "WORLD_SIZE") if name in environ]
        if not given:
            _require_alone(environ)
            return None
        if len(given) == 1:
            missing = "WORLD_SIZE" if given == ["RANK"] else "RANK"
            raise ConfigError(
                f"the environment has {given[0]} but not {missing}: start with torchrun, which sets both, or unset "
                f"{given[0]} to have zeromesh start its own processes"
            )
        world = _number(environ, "WORLD_SIZE", 1)
        rank = _number(environ, "RANK", 0, world, f"WORLD_SIZE = {world}")
        local_world = _number(environ, "LOCAL_WORLD_SIZE", 1, world + 1, default=1)
        local_rank = _number(environ, "LOCAL_RANK", 0, local_world, f"LOCAL_WORLD_SIZE = {local_world}", default=0)
        return cls(rank=rank, world=world, local_rank=local_rank, local_world=local_world)


def _require_alone(environ: Mapping[str, str]) -> None:
    """Raise ConfigError where a launcher has started several processes and has not told them of each other."""
    for name, rank in (("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"), ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")):
        count = environ.get(name, "")
        if count.isdecimal() and int(count) > 1:
            raise ConfigError(
                f"the environment has {name}={count} but neither RANK nor WORLD_SIZE, so that each of these processes "
                f"would run for itself: set RANK=${rank} WORLD_SIZE=${name} in each, with LOCAL_RANK, "
                f"LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT (docs/checkpoints.md has the lines for srun), or start "
                f"torchrun; unset {name} if that is what they should do"
            )


def check_address(environ: Mapping[str, str]) -> None:
    """Raise ConfigError unless the environment says where the ranks meet."""
    if not environ.get("MASTER_ADDR", "").strip():
        raise ConfigError(
            "the environment has RANK and WORLD_SIZE, so MASTER_ADDR must say where rank 0 listens; it is "
            f"{'empty' if 'MASTER_ADDR' in environ else 'not set'}: start with torchrun, or set it to rank 0's host"
        )
    _number(environ, "MASTER_PORT", 1, 65536)


def _number(
    environ: Mapping[str, str],
    name: str,
    least: int,
    below: int | None = None,
    called: str = "",
    *,
    default: int | None = None,
) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is not None and text.removeprefix("-").isdecimal() and least <= int(text) < (below or int(text) + 1):
        return int(text)
    bound = f"of at least {least}" + (f" and below {called or below}" if below else "")
    raise ConfigError(
        f"the environment's {name} must be a whole number {bound}; "
        f"{'it is not set' if text is None else f'got {text!r}'}: it is the launcher's to set (torchrun does); unset "
        f"RANK and WORLD_SIZE to have zeromesh start its own processes"
    )
