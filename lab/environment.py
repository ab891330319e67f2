"""A rank's environment as torchrun would set it."""

from __future__ import annotations

from collections.abc import Mapping

from lab.plan import Wiring
from lab.tree import Place

# Variables of a torchrun that may stand around the lab; a rank that saw them would look for that run's store.
_FOREIGN = ("TORCHELASTIC_", "TORCH_NCCL_", "PET_")

# One thread per rank as torchrun sets it, and unbuffered output, so that the last words of a killed rank are not lost.
_DEFAULTS = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def environment(wiring: Wiring, place: Place, *, port: int, around: Mapping[str, str]) -> dict[str, str]:
    """The environment of the rank at `place`; rank 0 listens at `port` for the others. That `around` the lab is passed
    on, except that another torchrun's variables are dropped."""
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
