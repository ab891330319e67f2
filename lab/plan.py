"""Kernel commands that create a tree: pure data, no side effects.

There is one namespace per switch and per leaf, a bridge in each switch, one veth pair per link, and a token bucket at
both of its ends. ::

      namespace root:        br0 = port0 + port1
                                   tbf     tbf          from above to below
                                   |       |            one veth pair each
                                   tbf     tbf          from below to above
      namespace 0, a switch: br0 = eth0 + port0 + ...
      namespace 0.0, a leaf: eth0, 10.77.0.1/16

[Note: nothing but the ranks' bytes] The lab is for its interface counters, so a link carries nothing that no rank sent.
Neighbours and forwarding entries are fixed (no ARP, no flooding of unknown addresses), no IPv6 address is made (no
router solicitation, no multicast listener report), and bridges neither learn nor snoop.

[Note: congestion control] It is set per route, both to other leaves and back into the own one. In containers, the
sysctl of a new namespace cannot be written; and if the machine's default is bbr, a flow paces itself below the rate
that the bucket allows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from lab.tree import Link, Place, Tree, TreePath, format_rate, path_name

# If an interface's number equals its peer's, the kernel takes it for a physical one, and may then wait a second before
# it uses a link that has come up. So the numbers differ.
_UPLINK_INDEX = 1000
_PORT_INDEX = 2000

CONGESTION_CONTROL = "cubic"

#: The interface at the lower end of every link, in leaves and switches alike.
UPLINK = "eth0"

# A bucket must hold the largest packet of the sender's offload (64 KiB), with room for a second one, and at high rates
# the bytes of a kernel timer's period. Measured 2026-11 on Linux 6.18 with one veth pair per link: with these two,
# rates are within .2 % of the nominal from 100 Mbit/s to 4 Gbit/s, both directions at once, three levels at once.
MIN_BURST_BYTES = 128 * 1024
BURST_S = 1e-3
# Behind the bucket, at least this much can wait before a packet is dropped: enough for TCP to keep the link busy.
QUEUE_BURSTS = 4
QUEUE_S = 20e-3
# tbf counts bursts in ticks of 64 ns, and the queue in bytes, both in 32 bits. It was seen to work within these.
TAKEN_RATES = "10kbit to 1tbit"

# Variables of a torchrun that may run around the lab. A rank that saw them would look for that run's store.
_FOREIGN = ("TORCHELASTIC_", "TORCH_NCCL_", "PET_")

# One thread per rank, as in torchrun, and unbuffered output, so that a killed rank's last lines are not lost.
_DEFAULTS = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    argv: tuple[str, ...]
    stdin: str = ""  # lines of a batch, one instruction each
    purpose: str  # for the error message


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """A token bucket at one end of a link."""

    namespace: str
    interface: str  # its outgoing packets are held back
    rate_bytes_per_s: float

    @property
    def burst_bytes(self) -> int:
        """Bytes that may leave at once after a pause."""
        return max(MIN_BURST_BYTES, math.ceil(BURST_S * self.rate_bytes_per_s))

    @property
    def queue_bytes(self) -> int:
        """Bytes that may wait before packets are dropped."""
        return max(QUEUE_BURSTS * self.burst_bytes, math.ceil(QUEUE_S * self.rate_bytes_per_s))

    @property
    def instruction(self) -> str:
        """The line of a tc batch that makes the bucket."""
        return (
            f"qdisc replace dev {self.interface} root tbf rate {round(self.rate_bytes_per_s * 8)}bit "
            f"burst {self.burst_bytes} limit {self.queue_bytes}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """A tree under a lab's name: the names of its parts, and the commands that make it."""

    lab: str  # prefix of all its namespaces
    tree: Tree
    has_ipv6: bool = True  # whether the kernel knows IPv6, and must be kept from sending it

    def namespace(self, path: TreePath) -> str:
        return f"{self.lab}-{path_name(path)}"

    @property
    def namespaces(self) -> tuple[str, ...]:
        """All namespaces, switches first."""
        return tuple(self.namespace(path) for path in (*self.tree.switches, *self.tree.leaves))

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """Two buckets for every shaped link."""
        return tuple(bucket for link in self.tree.links for bucket in self._buckets(link))

    @property
    def interface(self) -> str:
        """The interface that ranks bind to: a leaf's uplink, or loopback if there is one leaf and no link."""
        return UPLINK if self.tree.levels else "lo"

    def leaf_address(self, leaf: int) -> str:
        """The IPv4 address of a leaf; loopback if there is one leaf and no link."""
        return address(leaf) if self.tree.levels else "127.0.0.1"

    def switch_interfaces(self, path: TreePath) -> list[str]:
        """The interfaces that a switch's bridge joins."""
        ports = [port(link) for link in self.tree.links if link.path[:-1] == path]
        return [UPLINK, *ports] if path else ports

    def up(self) -> tuple[Command, ...]:
        """Returns the commands that create the lab, in order."""
        namespaces = [f"netns add {name}" for name in self.namespaces]
        leaf_numbers = {path: leaf for leaf, path in enumerate(self.tree.leaves)}
        links = [self._link_line(link, leaf_numbers.get(link.path)) for link in self.tree.links]
        return (
            _batch(("ip",), namespaces, "make network namespaces"),
            *([_batch(("ip",), links, "make veth pairs")] if links else []),
            *(self._switch_command(path) for path in self.tree.switches),
            *(self._forwarding_command(path) for path in self.tree.switches),
            *(self._leaf_command(leaf, path) for leaf, path in enumerate(self.tree.leaves)),
            *self._shaping_commands(),
        )

    def _buckets(self, link: Link) -> Iterator[Bucket]:
        if link.rate_bytes_per_s is not None:
            for path, interface in ((link.path, UPLINK), (link.path[:-1], port(link))):
                yield Bucket(
                    namespace=self.namespace(path), interface=interface, rate_bytes_per_s=link.rate_bytes_per_s
                )

    def _link_line(self, link: Link, leaf: int | None) -> str:
        below, above = self.namespace(link.path), self.namespace(link.path[:-1])
        mac_clause = "" if leaf is None else f" address {mac(leaf)}"
        lower = f"{UPLINK} index {_UPLINK_INDEX}{mac_clause} netns {below}"
        upper = f"{port(link)} index {_PORT_INDEX + link.path[-1]} netns {above}"
        return f"link add {lower} type veth peer name {upper}"

    def _switch_command(self, path: TreePath) -> Command:
        lines = ["link add br0 type bridge stp_state 0 mcast_snooping 0", *self._quiet("br0")]
        for interface in self.switch_interfaces(path):
            lines += self._quiet(interface)
            lines += [
                f"link set {interface} master br0",
                f"link set {interface} type bridge_slave learning off flood off mcast_flood off bcast_flood off",
                f"link set {interface} up",
            ]
        return self._inside("ip", path, [*lines, "link set br0 up"], "make a switch")

    def _forwarding_command(self, path: TreePath) -> Command:
        lines = [
            f"fdb replace {mac(leaf)} dev {self._way(path, leaf_path)} master static"
            for leaf, leaf_path in enumerate(self.tree.leaves)
        ]
        return self._inside("bridge", path, lines, "fix the forwarding table of a switch")

    def _leaf_command(self, leaf: int, path: TreePath) -> Command:
        lines = ["link set lo up"]
        if self.tree.levels:
            own, control = address(leaf), f"congctl {CONGESTION_CONTROL}"
            lines += [
                *self._quiet(UPLINK),
                f"address add {own}/16 dev {UPLINK} noprefixroute",
                f"link set {UPLINK} up",
                f"route replace 10.77.0.0/16 dev {UPLINK} src {own} {control}",
                f"route replace local {own} dev {UPLINK} table local proto kernel scope host src {own} {control}",
                *(
                    f"neighbour replace {address(other)} lladdr {mac(other)} dev {UPLINK} nud permanent"
                    for other in range(self.tree.num_leaves)
                    if other != leaf
                ),
            ]
        return self._inside("ip", path, lines, "set up a leaf")

    def _shaping_commands(self) -> Iterator[Command]:
        rates = sorted({bucket.rate_bytes_per_s for bucket in self.buckets})
        purpose = f"shape links at {', '.join(map(format_rate, rates))} (the kernel takes {TAKEN_RATES})"
        by_namespace: dict[str, list[str]] = {}
        for bucket in self.buckets:
            by_namespace.setdefault(bucket.namespace, []).append(bucket.instruction)
        for namespace, lines in by_namespace.items():
            yield _batch(("tc", "-n", namespace), lines, purpose)

    def _way(self, switch: TreePath, leaf: TreePath) -> str:
        below = leaf[: len(switch)] == switch
        return f"port{leaf[len(switch)]}" if below else UPLINK

    def _quiet(self, interface: str) -> list[str]:
        return [f"link set {interface} addrgenmode none"] if self.has_ipv6 else []

    def _inside(self, program: str, path: TreePath, lines: Iterable[str], purpose: str) -> Command:
        return _batch((program, "-n", self.namespace(path)), lines, purpose)


def port(link: Link) -> str:
    """The interface at the upper end of `link`, in the switch above it."""
    return f"port{link.path[-1]}"


def address(leaf: int) -> str:
    """The IPv4 address of leaf number `leaf`.

    >>> address(0), address(250)
    ('10.77.0.1', '10.77.1.1')
    """
    return f"10.77.{leaf // 250}.{leaf % 250 + 1}"


def mac(leaf: int) -> str:
    """The Ethernet address of leaf number `leaf`; 02 marks it as locally administered.

    >>> mac(258)
    '02:7a:6d:00:01:02'
    """
    return f"02:7a:6d:00:{leaf // 256:02x}:{leaf % 256:02x}"


def environment(wiring: Wiring, place: Place, *, port: int, around: Mapping[str, str]) -> dict[str, str]:
    """The environment of the rank at `place`, as torchrun would set it; rank 0 listens at `port` for the others. It
    includes `around`, the lab's own environment, without another torchrun's variables."""
    tree = wiring.tree
    ranks = {
        "RANK": place.rank,
        "WORLD_SIZE": tree.world_size,
        "LOCAL_RANK": place.local_rank,
        "LOCAL_WORLD_SIZE": tree.ranks_per_leaf,
        "GROUP_RANK": place.leaf,
        "GROUP_WORLD_SIZE": tree.num_leaves,
        "NODE_RANK": place.leaf,
        "ROLE_RANK": place.rank,
        "ROLE_WORLD_SIZE": tree.world_size,
        "MASTER_PORT": port,
    }
    names = {
        "ROLE_NAME": "default",
        "MASTER_ADDR": wiring.leaf_address(0),
        "GLOO_SOCKET_IFNAME": wiring.interface,
        "NCCL_SOCKET_IFNAME": wiring.interface,
        "TP_SOCKET_IFNAME": wiring.interface,
        "ZEROMESH_LAB": wiring.lab,
        "ZEROMESH_LAB_TREE": str(tree),
        "ZEROMESH_LAB_ADDRESS": wiring.leaf_address(place.leaf),
    }
    kept = {name: value for name, value in around.items() if not name.startswith(_FOREIGN)}
    return _DEFAULTS | kept | names | {name: str(value) for name, value in ranks.items()}


def _batch(program: tuple[str, ...], lines: Iterable[str], purpose: str) -> Command:
    return Command(argv=(*program, "-batch", "-"), stdin="\n".join(lines) + "\n", purpose=purpose)
