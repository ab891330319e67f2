"""Calibration of a device's rates by a measured run.

The device's matrix rate and its memory's rate are multiplied by one factor, so that the simulated step of the run's own
layout is as long as the measured one. All other errors of a prediction (the network, kernels that wait for the host) go
into that factor too, since a run's file has the length of its steps but not their waiting. So plans should be for the
same model and devices. The answer says how much of the step is waiting, which was predicted and not measured.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from zeromesh.cluster.cluster import Cluster
from zeromesh.cost.compute import ComputeModel
from zeromesh.cost.constants import default_constants
from zeromesh.errors import InputError
from zeromesh.files.users import parse_json, read_text
from zeromesh.simulator.result import Simulation

SLOWEST, FASTEST = 1e-4, 1e3
"""Factors beyond which a run is not of this model or these devices."""

CLOSE = 1e-3
"""Largest error of the calibrated step, as a share of the measured one."""

NAMES = ("metrics.jsonl", "trainer_state.json", "train_results.json", "all_results.json")
"""Files searched for in a run's directory, in this order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    step_s: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    measured: MeasuredStep
    predicted_s: float  # before the calibration
    factor: float  # of the device's rates
    exposed_s: float  # predicted with these rates
    cluster: Cluster  # with these rates
    strategy: str  # the run's layout, given or assumed

    def describe(self) -> str:
        """One line: the measurement, the error of the prediction, and the factor."""
        off, waits = self.predicted_s / self.measured.step_s - 1, self.exposed_s / self.measured.step_s
        return (
            f"like {self.measured.source}: {self.strategy} took {self.measured.step_s:.4g} s a step where "
            f"{self.predicted_s:.4g} s were predicted ({abs(off):.1%} too {'long' if off > 0 else 'short'}); the "
            f"device counts as {self.factor:.3g} times as fast from here on. {waits:.1%} "
            f"of that step is waiting for the network, as predicted and not measured"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "source": self.measured.source,
            "strategy": self.strategy,
            "measured_step_s": self.measured.step_s,
            "predicted_step_s": self.predicted_s,
            "off": self.predicted_s / self.measured.step_s - 1,
            "factor": self.factor,
            "exposed_comm_s": self.exposed_s,
        }


def read_run(run: str, tokens: int) -> MeasuredStep:
    """The measured step of a run, with so many tokens. The run is given by the tokens a second of all devices together,
    by a `metrics.jsonl` of `zeromesh train`, by a `trainer_state.json` or `train_results.json` of transformers'
    Trainer, or by their directory. Raises InputError if it is none of these, or its steps have other sizes."""
    rate = run.lower().replace("tokens/s", "").replace("_", "").replace(",", "").strip()
    try:
        per_second = float(rate)
    except ValueError:
        return _read_file(Path(run), tokens)
    if not 0 < per_second < math.inf:
        raise InputError(f"--like: tokens a second must be positive, got {run}")
    return MeasuredStep(step_s=tokens / per_second, source=f"{per_second:,.6g} tokens/s")


def calibrate(
    cluster: Cluster, measured: MeasuredStep, strategy: str, predict: Callable[[Cluster], Simulation]
) -> Calibration:
    """Finds the factor for which `predict`, the step of the run's layout on a cluster, takes the measured seconds.
    Raises InputError if no speed of the device explains them."""
    predicted = predict(cluster).step_s
    low, high = SLOWEST, FASTEST
    if not predict(_scaled(cluster, high)).step_s <= measured.step_s <= predict(_scaled(cluster, low)).step_s:
        raise InputError(
            f"--like: {strategy} took {measured.step_s:.4g} s a step in {measured.source}, where {predicted:.4g} s are "
            f"predicted; no rate of the device explains that: check model, cluster, world, batch and --like-strategy, "
            f"and the cluster's network (zeromesh probe)"
        )
    factor = 1.0
    for _ in range(60):  # each halves the range, so 40 are enough
        found = predict(_scaled(cluster, factor))
        if abs(found.step_s / measured.step_s - 1) <= CLOSE:
            break
        low, high = (factor, high) if found.step_s > measured.step_s else (low, factor)
        factor = math.sqrt(low * high)
    return Calibration(
        measured=measured,
        predicted_s=predicted,
        factor=factor,
        exposed_s=found.exposed_comm_s,
        cluster=_scaled(cluster, factor),
        strategy=strategy,
    )


def _scaled(cluster: Cluster, factor: float) -> Cluster:
    """The cluster with all rates of its device times `factor`. The peak, which defines utilisation, rises only if a
    rate exceeds it."""
    device, constants = cluster.device, default_constants()
    peaks, any_dtype = dict(device.peak_flops), ComputeModel(device=device, constants=constants)
    achieved = {dtype: replace(any_dtype, dtype=dtype).matrix_flops * factor for dtype in peaks}
    faster = replace(
        device,
        peak_flops={dtype: max(peak, achieved[dtype]) for dtype, peak in peaks.items()},
        achievable_flops=achieved,
        memory_bytes_per_s=any_dtype.memory_bytes_per_s / constants.memory_share * factor,
        kernels=tuple(kernel.times(factor) for kernel in device.kernels),
    )
    return replace(cluster, device=faster)


def _read_file(path: Path, tokens: int) -> MeasuredStep:
    if path.is_dir():
        found = next((path / name for name in NAMES if (path / name).exists()), None)
        if found is None:
            raise InputError(f"--like: {path} holds none of {', '.join(NAMES)}")
        path = found
    elif not path.exists():
        raise InputError(
            f"--like must be the file or the directory of a run, or tokens a second of all devices together as a "
            f"number (120000, or '120000 tokens/s'), got {str(path)!r}, which is none and is not there"
        )
    text = read_text(path, kind="a run's metrics")
    step_s = _of_metrics(text, tokens, path) if path.suffix == ".jsonl" else _of_trainer(text, path)
    return MeasuredStep(step_s=step_s, source=str(path))


def _of_metrics(text: str, tokens: int, path: Path) -> float:
    """The median step of a file of `zeromesh train`, without the first tenth, which warms up."""
    steps, counts_all = [], True
    for number, line in enumerate(text.splitlines(), 1):
        try:
            found = json.loads(line)
            counts_all = counts_all and "positions" in found
            steps.append((float(found["step_s"]), int(found.get("positions", found["tokens"]))))
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise InputError(f"--like: {path}, line {number}, is no step of zeromesh train's: {error!r}") from error
    if not steps:
        raise InputError(f"--like: {path} holds no steps yet")
    kept = steps[-(-len(steps) // 10) :] or steps
    counted = median(count for _, count in kept)
    # Older files count only learned tokens: of a chat, its answers.
    least = tokens * (0.99 if counts_all else 0.5)
    if not least <= counted <= tokens * 1.01:
        raise InputError(
            f"--like: a step of {path} has {counted:,.0f} tokens and --global-batch-tokens says {tokens:,}: give the "
            f"run's own, or its tokens a second as a number"
        )
    return _positive(median(seconds for seconds, _ in kept), path)


def _of_trainer(text: str, path: Path) -> float:
    """The mean step of a Trainer's run, which includes evaluation and saving."""
    found = parse_json(text, where=f"--like: {path}")
    state = found if isinstance(found, dict) else {}
    history = state.get("log_history", [state])
    entries = [entry for entry in history if isinstance(entry, dict)] if isinstance(history, list) else []
    ends = [entry for entry in entries if _number(entry, "train_steps_per_second")]
    if not ends:
        raise InputError(
            f"--like: {path} has no train_steps_per_second, which the Trainer writes when a run ends: give the "
            f"trainer_state.json or train_results.json of its output directory, or tokens a second as a number"
        )
    runtime, steps = _number(ends[-1], "train_runtime"), _number(state, "max_steps")
    if runtime and steps:  # the rate itself is written with three decimals only
        return _positive(runtime / steps, path)
    return _positive(1 / _number(ends[-1], "train_steps_per_second"), path)


def _number(entry: dict[str, Any], key: str) -> float:
    """A number in the entry; 0 if there is none."""
    value = entry.get(key)
    return float(value) if isinstance(value, int | float) else 0.0


def _positive(value: float, path: Path) -> float:
    if not 0 < value < math.inf:
        raise InputError(f"--like: {path} tells of no time that a step takes")
    return value
