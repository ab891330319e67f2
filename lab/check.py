"""Checks that the kernel did as planned: it changes some rates, and brings links up, without reporting it."""

from __future__ import annotations

import time
from collections.abc import Mapping

from lab.plan import TAKEN_RATES, Bucket, Command, Wiring
from lab.shell import execute_json
from lab.tree import LabError, TreePath, format_rate

# The kernel keeps a rate in bytes per second and a burst in ticks of 64 ns. A larger difference means that it could not
# represent the value.
_TOLERANCE = 0.01

# Ports forward within milliseconds after being set up. A kernel that batches its link events takes a second.
PORTS_TIMEOUT_S = 10.0
_POLL_S = 5e-3


def check_kernel(wiring: Wiring) -> None:
    """Waits until every switch forwards, and compares every bucket with the requested rate. Raises LabError if a port
    does not come up, or the kernel shapes otherwise than requested."""
    for path in wiring.tree.switches:
        _wait_for_ports(wiring, path)
    _check_buckets(wiring)


def _wait_for_ports(wiring: Wiring, path: TreePath) -> None:
    namespace = wiring.namespace(path)
    command = Command(argv=("bridge", "-n", namespace, "-j", "link", "show"), purpose="read the state of a switch")
    deadline = time.monotonic() + PORTS_TIMEOUT_S
    waiting = set(wiring.switch_interfaces(path))
    while waiting:
        waiting -= {row["ifname"] for row in execute_json(command) if row.get("state") == "forwarding"}
        if waiting and time.monotonic() > deadline:
            raise LabError(f"switch {namespace}: {sorted(waiting)} did not come up within {PORTS_TIMEOUT_S:g} s")
        if waiting:
            time.sleep(_POLL_S)


def _check_buckets(wiring: Wiring) -> None:
    buckets: dict[str, list[Bucket]] = {}
    for bucket in wiring.buckets:
        buckets.setdefault(bucket.namespace, []).append(bucket)
    for namespace, wanted in buckets.items():
        command = Command(argv=("tc", "-n", namespace, "-j", "qdisc", "show"), purpose="read back the shaping")
        taken = {row["dev"]: row for row in execute_json(command) if row["kind"] == "tbf"}
        for bucket in wanted:
            _check_bucket(bucket, taken.get(bucket.interface, {}).get("options", {}))


def _check_bucket(bucket: Bucket, taken: Mapping[str, int]) -> None:
    rate, burst = taken.get("rate", 0), taken.get("burst", 0)
    rate_off = abs(rate - bucket.rate_bytes_per_s) > _TOLERANCE * bucket.rate_bytes_per_s
    burst_off = abs(burst - bucket.burst_bytes) > _TOLERANCE * bucket.burst_bytes
    if rate_off or burst_off:
        raise LabError(
            f"the kernel refuses the rate {format_rate(bucket.rate_bytes_per_s)}: asked to let bursts of "
            f"{bucket.burst_bytes} bytes pass, it set {rate * 8} bit/s and bursts of {burst} bytes; "
            f"it takes {TAKEN_RATES}"
        )
