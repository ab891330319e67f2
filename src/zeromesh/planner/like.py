"""How fast a device has been seen to be: the rates at which a measured run's own layout takes what it took.

The device's matrix rate and its memory's are multiplied by one factor, with which the simulated step is as long as the
measured one. All else that a prediction gets wrong (the network, kernels that wait for the host) goes into that factor
too: a run's file has the length of its steps and not what they waited for. So what is planned for has to be alike, the
same model and devices, and the answer says how much of the step is waiting that was predicted and not measured.
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
"""Share of the measured step by which the calibrated one may be off."""

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
    strategy: str  # the layout that the run had, or is taken to have had

    def describe(self) -> str:
        """One line: what was measured, how far off the prediction was, and what is used now."""
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
    """A step, of so many tokens, of a run: given by tokens a second of all devices together; or by a `metrics.jsonl` of
    `zeromesh train`, a `trainer_state.json` or `train_results.json` of transformers' Trainer, or their directory.
    Raises InputError if it is none of these, or its steps are of other sizes."""
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
    """The factor with which `predict`, the step of the run's layout on a cluster, takes the measured seconds. Raises
    InputError if no device, however fast or slow, gives them."""
    predicted = predict(cluster).step_s
    low, high = SLOWEST, FASTEST
    if not predict(_scaled(cluster, high)).step_s <= measured.step_s <= predict(_scaled(cluster, low)).step_s:
        raise InputError(
            f"--like: {strategy} took {measured.step_s:.4g} s a step in {measured.source}, where {predicted:.4g} s are "
            f"predicted; no rate of the device explains that: check model, cluster, world, batch and --like-strategy, "
            f"and the cluster's network (zeromesh probe)"
        )
    factor = 1.0
    for _ in range(60):  # halves its range, so 40 are enough
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
    """Its device with all rates times `factor`; the peak, by which utilisation is told, where it holds them."""
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
    """The median step of a file of ours, without the first tenth, which warms up."""
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
    # Older files count what is learned, which answers are a part of.
    least = tokens * (0.99 if counts_all else 0.5)
    if not least <= counted <= tokens * 1.01:
        raise InputError(
            f"--like: a step of {path} has {counted:,.0f} tokens and --global-batch-tokens says {tokens:,}: give the "
            f"run's own, or its tokens a second as a number"
        )
    return _positive(median(seconds for seconds, _ in kept), path)


def _of_trainer(text: str, path: Path) -> float:
    """The mean step of a Trainer's run, which counts evaluation and saving in."""
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
    if runtime and steps:  # what that rate is made of, which is written with three places only
        return _positive(runtime / steps, path)
    return _positive(1 / _number(ends[-1], "train_steps_per_second"), path)


def _number(entry: dict[str, Any], key: str) -> float:
    """0 where there is none."""
    value = entry.get(key)
    return float(value) if isinstance(value, int | float) else 0.0


def _positive(value: float, path: Path) -> float:
    if not 0 < value < math.inf:
        raise InputError(f"--like: {path} tells of no time that a step takes")
    return value
