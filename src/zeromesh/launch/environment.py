"""What a launcher (torchrun, srun) tells a process of the run in its environment. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from zeromesh.errors import ConfigError

MAX_PORT = 65535

NO_NAME = "none"
"""What torchrun calls a run that was given no name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """This process as its launcher sees it.

    Args:
        rank, world: over the whole run.
        local_rank, local_world: on this machine.
        again: whether the run may have been started before: the launcher has counted a restart, or it is torchrun with
            a name for the run, which does not count where nodes have come or gone.
        job: the launcher's name of the run, the same after a restart; empty where it has none.
    """

    rank: int
    world: int
    local_rank: int
    local_world: int
    again: bool = False
    job: str = ""

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Self | None:
        """What torchrun's variables say; None where there are none: the process was started by hand.

        Raises:
            ConfigError: some are there and others are not, or one cannot be right, or another launcher has started
                several processes without them; names it.
        """
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
        rank = _number(environ, "RANK", 0, world, "WORLD_SIZE")
        local_world = _number(environ, "LOCAL_WORLD_SIZE", 1, world + 1, "WORLD_SIZE + 1", default=1)
        local_rank = _number(environ, "LOCAL_RANK", 0, local_world, "LOCAL_WORLD_SIZE", default=0)
        again, job = _start(environ)
        return cls(rank=rank, world=world, local_rank=local_rank, local_world=local_world, again=again, job=job)

    @classmethod
    def alone(cls, environ: Mapping[str, str]) -> Self:
        """A process started by hand, which meets no others; SLURM may have put its job back in the queue."""
        again, job = _start(environ)
        return cls(rank=0, world=1, local_rank=0, local_world=1, again=again, job=job)


def _start(environ: Mapping[str, str]) -> tuple[bool, str]:
    """Whether the run may have been started before, and its name: torchrun's, or else SLURM's."""
    run_id = environ.get("TORCHELASTIC_RUN_ID", NO_NAME)
    named = run_id not in ("", NO_NAME)
    counts = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
    restarts = sum(_number(environ, name, 0, default=0) for name in counts)
    return named or restarts > 0, run_id if named else environ.get("SLURM_JOB_ID", "")


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
    _number(environ, "MASTER_PORT", 1, MAX_PORT + 1, str(MAX_PORT + 1))


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
    bound = f"of at least {least}" + (
        f" and below {called}" + (f" = {below}" if called != str(below) else "") if below else ""
    )
    try:
        number = int(text or "")
    except ValueError:
        number = least - 1
    if number < least or (below is not None and number >= below):
        got = "it is not set" if text is None else f"got {text!r}"
        raise ConfigError(
            f"the environment's {name} must be a whole number {bound}; {got}: it is the launcher's to set (torchrun "
            f"does); unset RANK and WORLD_SIZE to have zeromesh start its own processes"
        )
    return number
