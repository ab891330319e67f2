"""Runs the plan: one place that starts ip, tc and bridge, and turns their complaints into messages."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from typing import Any

from lab.plan import Command
from lab.tree import LabError

#: The programs that a lab needs, and the Debian package of each.
TOOLS = {"ip": "iproute2", "tc": "iproute2", "bridge": "iproute2", "setpriv": "util-linux"}

# Each command takes milliseconds; a kernel that is busy tearing namespaces down has been seen to take seconds.
COMMAND_TIMEOUT_S = 30.0

_FAILED_LINE = re.compile(r"Command failed [^:]*:(\d+)")


def check_host() -> None:
    """Refuse, in one message, on a machine where no lab can be made."""
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
    """Run `command` and return its output. LabError if it fails or does not end, with the instruction and the kernel's
    words."""
    try:
        done = subprocess.run(
            command.argv,
            input=command.stdin,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
            start_new_session=True,  # a terminal's Ctrl-C goes to all of its group, and a lab is removed to the end
        )
    except subprocess.TimeoutExpired as error:
        raise LabError(f"cannot {command.purpose}: {_shown(command)} did not end in {COMMAND_TIMEOUT_S:g} s") from error
    if done.returncode != 0:
        raise LabError(f"cannot {command.purpose}: {_instruction(command, done.stderr)}: {_complaint(done.stderr)}")
    return done.stdout


def execute_json(command: Command) -> list[dict[str, Any]]:
    """Run `command` and return the list of objects that it printed as JSON."""
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
    # tc follows a complaint with its usage; the first line says what is wrong.
    lines = [line.strip() for line in stderr.splitlines() if line.strip() and not _FAILED_LINE.search(line)]
    return lines[0] if lines else "it gave no reason"
