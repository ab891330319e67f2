"""The setting of a measurement, for its result file. Imports no torch."""

from __future__ import annotations

import os
import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import zeromesh

OTHERS = ("torch", "triton", "transformers", "accelerate", "peft", "trl", "lightning", "deepspeed")
"""Packages whose versions are listed if they are installed."""


def read_setting() -> dict[str, Any]:
    """Versions, machine, time and load over 1, 5 and 15 minutes. With a load above the cores, timings say little."""
    return {
        "zeromesh": zeromesh.__version__,
        "python": sys.version.split()[0],
        **{name: found for name in OTHERS if (found := _version(name)) is not None},
        "platform": platform.platform(),
        "machine": processor_name(),
        "cores": os.cpu_count(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def processor_name() -> str:
    """The processor's model, or its architecture if the system does not tell."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
