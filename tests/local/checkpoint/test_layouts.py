"""Any layout's shards load under any other: all ranks of both sides in this process, chosen by hypothesis.

Messages of ranks are left out here; tests/dist/checkpoint/test_reshard.py has them, for fewer pairs.
"""

from __future__ import annotations

import uuid
from math import prod

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.local.checkpoint.strategies import STRATEGIES
from zeromesh.checkpoint.manifest import Manifest
from zeromesh.checkpoint.read import Reader, read_manifest
from zeromesh.checkpoint.storage import Storage, open_storage
from zeromesh.checkpoint.tensors import param_piece, replica_of
from zeromesh.checkpoint.write import Written, entries_of, files_of, write_file
from zeromesh.engine.build import make_control
from zeromesh.engine.elements import Home
from zeromesh.engine.flat import FlatShards
from zeromesh.engine.units import ParamInfo, Precision
from zeromesh.pieces.piece import Piece, share
from zeromesh.schedule.buffer_layout import BufferLayout
from zeromesh.strategy import Layout

MESHES = ((1, 1), (2, 1), (1, 2), (3, 1), (1, 3), (4, 1), (2, 2), (1, 4), (6, 1), (3, 2), (2, 3), (1, 6))
"""(node, cluster): worlds 1, 2, 3, 4 and 6, in all ways to cut them."""

LAYOUTS = [
    Layout.of(strategy, [("node", node), ("cluster", cluster)]) for strategy in STRATEGIES for node, cluster in MESHES
]
SHAPES = st.lists(st.lists(st.integers(0, 5), max_size=4).map(tuple), min_size=1, max_size=5)
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])


def buffer_of(
    layout: Layout, rank: int, shapes: list[tuple[int, ...]], dtype: torch.dtype, trainable: bool
) -> FlatShards:
    """One unit's only flat buffer on one rank, as `zm.shard` makes it."""
    infos = [
        ParamInfo(names=(f"p{i}",), param=nn.Parameter(torch.empty(shape, dtype=dtype)), sites=())
        for i, shape in enumerate(shapes)
    ]
    spec = Precision().buffer(max(1, sum(map(prod, shapes))), dtype, trainable)  # as units are described
    buffer = FlatShards.allocate(BufferLayout.of(layout, spec), infos, layout.coordinates(rank), torch.device("cpu"))
    control = make_control(None)
    buffer.make_optimizer_params(Home(layout=layout, mesh=None, control=control), control, lambda values: None)
    return buffer


def pieces_of(buffer: FlatShards, values: dict[str, Tensor] | None) -> list[Piece]:
    """Slices of parameters and of a state of each; of `values` where they are given, empty memory else."""
    found = []
    for param in buffer.optimizer_params:
        own = param_piece(param)
        for name in (own.name, f"{own.name}.exp_avg"):
            local = torch.zeros_like(own.local)
            if values is not None:
                local.copy_(values[name][own.start : own.stop])
            found.append(Piece(name=name, shape=own.shape, start=own.start, local=local))
    return found


def save(storage: Storage, layout: Layout, values: dict[str, Tensor], *buffer: object) -> list[Written]:
    rows: list[Written] = []
    empty: list[Piece] = []
    storage.make("c")
    for rank in range(layout.world):
        held = buffer_of(layout, rank, *buffer)
        pieces = pieces_of(held, values)
        empty += [piece for piece in pieces if not prod(piece.shape)]
        mine = share([piece for piece in pieces if prod(piece.shape)], *replica_of(held))
        rows += write_file(storage, "c", f"__{rank}_0.distcp", mine)
    manifest = Manifest(step=3, serial=1, tensors=entries_of(rows, empty), files=files_of(rows))
    with storage.create("c", "manifest.json") as stream:
        stream.write(manifest.to_bytes())
    return rows


@settings(max_examples=60)
@given(st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS), SHAPES, DTYPES, st.booleans())
def test_any_pair(
    saved: Layout, loaded: Layout, shapes: list[tuple[int, ...]], dtype: torch.dtype, trainable: bool
) -> None:
    buffer = (shapes, dtype, trainable)
    pieces = pieces_of(buffer_of(LAYOUTS[0], 0, *buffer), None)
    generator = torch.Generator().manual_seed(0)
    values = {p.name: torch.rand(prod(p.shape), generator=generator).to(p.local.dtype) for p in pieces}
    storage = open_storage(f"memory://{uuid.uuid4()}")
    rows = save(storage, saved, values, *buffer)
    assert sum(row.chunk.stop - row.chunk.start for row in rows) == sum(value.numel() for value in values.values())
    with Reader(storage, "c", read_manifest(storage, "c")) as reader:
        assert set(reader.manifest.tensors) == set(values)
        for rank in range(loaded.world):
            found = pieces_of(buffer_of(loaded, rank, *buffer), None)
            reader.fill(found)
            for piece in found:
                assert torch.equal(piece.local, values[piece.name][piece.start : piece.stop])
    storage.remove("c")


def test_ranks_of_a_layout_write_as_much_as_each_other() -> None:
    """No rank writes more than its share, also of replicas."""
    for layout in LAYOUTS:
        sizes = []
        for rank in range(layout.world):
            held = buffer_of(layout, rank, [(12, 10), (60,)], torch.float32, True)
            sizes.append(sum(piece.num_bytes for piece in share(pieces_of(held, None), *replica_of(held))))
        assert sum(sizes) == 2 * 180 * 4
        padding = layout.padded(180) - 180  # which the last have, of parameters and gradients, and do not write
        assert max(sizes) - min(sizes) <= (8 + 2 * padding) * 4, layout
