"""Runs the plan: the one place that starts ip, tc and bridge, and turns their errors into messages."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from typing import Any

from lab.plan import Command
from lab.tree import LabError

#: The programs that a lab needs, with their Debian packages.
TOOLS = {"ip": "iproute2", "tc": "iproute2", "bridge": "iproute2", "setpriv": "util-linux"}

# Each command takes milliseconds. A kernel that is busy removing namespaces has been seen to take seconds.
COMMAND_TIMEOUT_S = 30.0

_FAILED_LINE = re.compile(r"Command failed [^:]*:(\d+)")


def check_host() -> None:
    """Raises one LabError with everything that keeps this machine from making a lab."""
    if os.geteuid() != 0:
        raise LabError(
            "an emulated cluster is made of network namespaces and needs root (CAP_SYS_ADMIN and CAP_NET_ADMIN), "
            f"this process runs as user {os.geteuid()}: use sudo, or a container started with --privileged"
        )
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        packages = " ".join(sorted({TOOLS[tool] for tool in missing}))
        raise LabError(f"an emulated cluster needs {', '.join(missing)}, not found in PATH: install {packages}")


def execute(command: Command) -> str:
    """Runs `command` and returns its output. Raises LabError if it fails or does not end, with the instruction and the
    kernel's message."""
    try:
        done = subprocess.run(
            command.argv,
            input=command.stdin,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
            start_new_session=True,  # so that Ctrl-C does not reach it: a removal must be completed
        )
    except subprocess.TimeoutExpired as error:
        raise LabError(f"cannot {command.purpose}: {_shown(command)} did not end in {COMMAND_TIMEOUT_S:g} s") from error
    if done.returncode != 0:
        raise LabError(f"cannot {command.purpose}: {_instruction(command, done.stderr)}: {_complaint(done.stderr)}")
    return done.stdout


def execute_json(command: Command) -> list[dict[str, Any]]:
    """Runs `command`, and returns the list of objects that it printed as JSON."""
    rows: list[dict[str, Any]] = json.loads(execute(command) or "[]")
    return rows


def _shown(command: Command) -> str:
    return " ".join(word for word in command.argv if word not in ("-batch", "-"))


def _instruction(command: Command, stderr: str) -> str:
    line = _FAILED_LINE.search(stderr)
    lines = command.stdin.splitlines()
    if line is None or int(line[1]) > len(lines):
        return _shown(command)
    return f"{_shown(command)} {lines[int(line[1]) - 1]}"


def _complaint(stderr: str) -> str:
    # tc prints its usage after an error; the first line has the reason.
    lines = [line.strip() for line in stderr.splitlines() if line.strip() and not _FAILED_LINE.search(line)]
    return lines[0] if lines else "it gave no reason"
