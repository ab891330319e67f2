"""`zm.rehearse` and a configuration's steps on the virtual device, against counts on real ranks."""

from __future__ import annotations

import itertools
import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import zeromesh as zm
from tests.dist.parallel.experts import example
from tests.dist.pool import Pool, shared
from tests.dist.train.harness import build_tiny, config, write_text
from tests.forks import run_python
from tests.simdev.ranks import alone
from zeromesh.cluster.catalogue import find_cluster
from zeromesh.errors import InputError, MeshError
from zeromesh.observe.report import memory_report, traffic_report
from zeromesh.rehearsal.result import failures_of
from zeromesh.rehearsal.show import rehearsal_page

WIDTH = 256
MESH = {"cluster": 128, "node": 8}
FAKE_TRANSFORMERS = Path(__file__).parents[1] / "local" / "train" / "fake"


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self, blocks: int = 4, width: int = WIDTH) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def build(mesh, strategy="node=3,cluster=1", width=WIDTH):
    with torch.device("meta"):
        model = Model(width=width)
    model = zm.shard(model, mesh, strategy, param_dtype=torch.bfloat16)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def step(model, optimizer, rows=64, width=WIDTH):
    for index in range(2):
        with zm.accumulate(model, last=index == 1):
            x = torch.zeros(rows, width, device="simdev", dtype=torch.bfloat16)
            model(x).float().square().mean().backward()
    zm.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()


@alone(virtual=True)
def test_a_step_of_ones_own_on_1024_ranks():
    found = zm.rehearse(step, build, mesh=MESH, rank=1000, cluster="a800-8x-hdr")
    assert not failures_of([found]), failures_of([found])
    memory = found.memory
    assert memory.predicted_bytes == memory.allocated_bytes > 0
    assert memory.peak.allocated_bytes > memory.rest_bytes >= memory.allocated_bytes
    # For 64 rows, a block keeps its input, the wide sum and its tanh for the backward.
    assert memory.activations_bytes >= 4 * 64 * 9 * WIDTH * 2
    assert memory.peak_reserved_bytes >= memory.peak.allocated_bytes and memory.fails_at is None
    assert memory.retries == 0
    for axis in found.axes:
        assert axis.sent_bytes == axis.predicted_bytes > 0
    launches = found.launches_per_unit()
    assert launches["compute"] > 20
    # In each of two micro-batches: a copy and a gather for the forward and, but for the last blocks, for the backward;
    # the backend's reduction and the sum onto earlier gradients.
    # The boundary adds a cast, the reduction and a cast back.
    assert (launches["unshard"], launches["reduce"]) == (8, 4 + 3) and launches["refresh"] <= 2
    assert not found.host_reads or all("zeromesh/engine/control.py" in read.where for read in found.host_reads)
    assert found.to_json()["memory"]["peak_at"] == str(memory.peak.place)


@alone(virtual=True)
def test_the_host_s_memory_is_virtual_too():
    """A large model takes more than any laptop has: predicted, allocated and counted to the byte in both places."""

    small = replace(find_cluster("a800-8x-hdr"), host_memory_bytes=100e9)
    for strategy, on_host in (
        ("host=1,node=3,cluster=1", ("optimizer", "grads", "buffers")),
        ("host=2,node=1,cluster=0", ("optimizer", "grads", "buffers")),
        ("host=1,node=3,cluster=1;step=device", ("optimizer",)),
        ("host=3,node=3,cluster=1;step=device", ("params", "grads", "optimizer")),
        ("host=3,node=3,cluster=3", ("params", "grads", "optimizer")),
        ("host=3d,node=3,cluster=2", ("params", "grads", "optimizer")),
        ("host[50%]=3,node=3,cluster=1", ("params", "grads", "optimizer")),
        ("node=3,cluster=3h", ("buffers",)),
    ):
        made = partial(build, strategy=strategy, width=1 << 14)
        found = zm.rehearse(lambda m, o: step(m, o, width=1 << 14), made, mesh=MESH, cluster=small)
        failures = failures_of([found])
        host = found.memory.host
        assert {line.kind for line in host.kinds if line.allocated_bytes} == set(on_host), strategy
        for line in (*host.kinds, *found.memory.kinds):
            assert line.predicted_bytes == line.allocated_bytes, (strategy, line)
        held = sum(line.allocated_bytes for line in host.kinds)
        # Beside shards: step counters, and a micro-batch's sum of one small unit that comes down to be added.
        assert held <= host.peak_bytes <= 1.06 * held, (strategy, held, host.peak_bytes)
        assert found.to_json()["host_memory"]["fits"] == (8 * host.peak_bytes <= 95e9) == (not failures), failures
        assert all("8 ranks of a machine keep 395 GB in its memory, of which 95 GB" in each for each in failures)
        assert {axis.direction for axis in found.axes if axis.axis == "host"} == {"up", "down"}
        for axis in found.axes:
            assert axis.sent_bytes == axis.predicted_bytes > 0, (strategy, axis)
        assert found.step_s > 0
        # Steps in the host's memory wait for no copy.
        assert not [read for read in found.host_reads if "not pinned" in read.what], strategy


@alone(virtual=True)
def test_seconds_are_those_of_kernels_and_links():
    """Twice the rows, longer kernels; the same bytes; and a cluster of slower links only communicates longer."""
    cluster = find_cluster("a800-8x-hdr")
    levels = [replace(level, bandwidth_bytes_per_s=level.bandwidth_bytes_per_s / 50) for level in cluster.levels]
    slow = replace(cluster, levels=tuple(levels))

    def run(rows, where):
        return zm.rehearse(lambda m, o: step(m, o, rows), build, mesh=MESH, cluster=where).trace

    # A host that needs a microsecond for each thing it does, however busy this machine is.
    with mock.patch("time.process_time", map((1e-6).__mul__, itertools.count()).__next__):
        few, slower, many = run(1 << 14, cluster), run(1 << 14, slow), run(1 << 15, cluster)
    seconds = [trace.seconds(kind="compute", name="backward") for trace in (few, many)]
    assert 1.8 < seconds[1] / seconds[0] < 2.2
    assert slower.seconds(kind="communicate", axis="node") > 4 * few.seconds(kind="communicate", axis="node")
    assert slower.seconds(kind="wait") > few.seconds(kind="wait")
    assert few.sent_bytes(axis="cluster") == slower.sent_bytes(axis="cluster") > 0
    # Gathers go over communicators that the mesh has made.
    assert {event.axis for event in few.events if "all_gather" in event.name} == {"node", "cluster"}


@alone(virtual=True)
@pytest.mark.parametrize("part", ["node=1,cluster=3", "node[2]=3,node[4]=1,cluster=1"])
def test_gathers_of_parts_take_the_time_of_their_axis(part):
    """Layouts of parts have axes of their own over the same communicators."""
    made = partial(build, strategy=f"node=3,cluster=1 | blocks.0: {part}")
    found = zm.rehearse(step, made, mesh={"cluster": 4, "node": 8}, cluster="a800-8x-hdr")
    assert not failures_of([found]), failures_of([found])
    axes = {event.axis for event in found.trace.events if "all_gather" in event.name}
    assert {axis.removeprefix("blocks.0:").partition("[")[0] for axis in axes} == {"node", "cluster"}


class Routed(nn.Module):
    """Each rank of the node has two experts, and sends as many rows to every other."""

    def __init__(self, mesh) -> None:
        super().__init__()
        self.mesh, self.experts = mesh, example.Experts(16, WIDTH, WIDTH)
        self.experts.spread(mesh)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        each = [len(x) // 8] * 8
        arrived = example.Exchange.apply(x, each, each, self.mesh.get_group())
        return x + example.Exchange.apply(self.experts(arrived, [len(x) // 2] * 2), each, each, self.mesh.get_group())


def with_experts(mesh, copies=None):
    with torch.device("meta"):
        model = Model()
        model.blocks.extend(Routed(mesh["node"]) for _ in range(2))
    experts = zm.Part(mesh=mesh["cluster"] if copies is None else copies(mesh), strategy="zero3")
    strategy = "node=3,cluster=1 | *.up: node=0,cluster=3"
    model = zm.shard(
        model,
        mesh,
        strategy,
        param_dtype=torch.bfloat16,
        units=[Block, Routed],
        parts={"*.experts": experts},
        init=lambda module: [param.fill_(0.5) for param in module.parameters(recurse=False)],
    )
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


@alone(virtual=True)
def test_parts_with_layouts_and_meshes_of_their_own():
    found = zm.rehearse(step, with_experts, mesh=MESH, rank=1000, cluster="a800-8x-hdr")
    assert not failures_of([found]) and found.step_s > 0, failures_of([found])
    axes = {axis.axis: axis for axis in found.axes}
    assert list(axes) == ["node", "cluster", "*.experts:cluster", "*.up:node", "*.up:cluster"]
    assert all(axis.sent_bytes == axis.predicted_bytes for axis in axes.values())
    # Gathered over 128 ranks and reduced in each of two micro-batches, but that each block is in its slot still.
    whole = 2 * 3 * WIDTH * WIDTH * 2 * 127 / 128
    assert axes["*.experts:cluster"].sent_bytes >= 2 * 2 * 2 * whole
    assert found.memory.predicted_bytes == found.memory.allocated_bytes

    def renamed(mesh):
        ranks = mesh["cluster"].mesh
        return DeviceMesh("simdev", ranks, mesh_dim_names=("copies",))

    with pytest.raises(
        InputError, match=r"axis \*\.experts:copies is none of the levels of a800-8x-hdr, node, cluster"
    ):
        zm.rehearse(step, lambda mesh: with_experts(mesh, renamed), mesh=MESH, cluster="a800-8x-hdr")


@alone(virtual=True)
def test_it_says_where_memory_runs_out():
    cluster = find_cluster("a800-8x-hdr")
    device = replace(cluster.device, memory_bytes=1.9e9)  # most of it is the context's
    found = zm.rehearse(lambda m, o: step(m, o, 1 << 14), build, mesh=MESH, cluster=replace(cluster, device=device))
    assert found.memory.fails_at is not None and found.memory.fails_at.place.phase == "forward"
    (said,) = failures_of([found])
    assert "does not fit: it needs" in said and "it runs out in the forward of blocks." in said
    assert found.step_s is not None  # it goes on nevertheless
    assert "it runs out in the forward" in rehearsal_page([found], [said])


@alone(virtual=True)
def test_ranks_that_issue_different_collectives_are_found():
    def uneven(model, optimizer):
        step(model, optimizer)
        if dist.get_rank() == 3:
            dist.all_reduce(torch.zeros(7, device="simdev"))

    same = [zm.rehearse(step, build, mesh=MESH, rank=rank) for rank in (0, 3)]
    assert failures_of(same) == ()
    found = [zm.rehearse(uneven, build, mesh=MESH, rank=rank) for rank in (0, 3)]
    (said,) = failures_of(found)
    assert "ranks 0 and 3 issue different collectives" in said
    assert "none on rank 0, all_reduce over mesh that sends 55 bytes on rank 3" in said


@alone(virtual=True)
def test_what_the_step_would_raise_is_said_with_its_place():
    def mixed(model, optimizer):
        model(torch.zeros(2, WIDTH + 1, device="simdev")).sum().backward()

    found = zm.rehearse(mixed, build, mesh=MESH)
    (said,) = found.failures
    assert "in the forward of blocks.0: RuntimeError: mat1 and mat2 shapes" in said and "test_rehearse.py:" in said
    assert found.step_s is None and found.memory.allocated_bytes > 0


@alone(virtual=True)
def test_an_operator_without_a_meta_kernel_is_named():
    with torch.library._scoped_library("rehearsed", "DEF") as library:
        library.define("strange(Tensor x) -> Tensor")
        library.impl("strange", lambda x: x.clone(), "CPU")

        def strange(model, optimizer):
            torch.ops.rehearsed.strange(model(torch.zeros(2048, 1 << 10, WIDTH, device="simdev", dtype=torch.bfloat16)))

        found = zm.rehearse(strange, build, mesh=MESH)
    (said,) = found.failures
    assert "rehearsed::strange cannot run on the virtual device" in said and "register_fake" in said


@alone(virtual=True)
def test_wrong_input_is_one_message():
    with pytest.raises(MeshError, match="ranks of this mesh are 0 to 1023, got 1024"):
        zm.rehearse(step, build, mesh=MESH, rank=1024)
    with pytest.raises(InputError, match="outermost first cluster, node; the mesh has node"):
        zm.rehearse(step, build, mesh={"node": 8}, cluster="a800-8x-hdr")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.raises(InputError, match="this process has one: rehearse before init_process_group"):
        zm.rehearse(step, build, mesh=MESH)
    dist.destroy_process_group()


def trained(run_config):
    """On a real rank: bytes that a second step allocates and sends, and the workspace of gloo's collectives."""
    from torch.distributed.device_mesh import init_device_mesh

    from zeromesh.engine.api import engine_of
    from zeromesh.launch.ranks import Ranks
    from zeromesh.train.corpus import read_corpus
    from zeromesh.train.loop import make_trainer

    mesh = init_device_mesh("cpu", tuple(run_config.mesh.values()), mesh_dim_names=tuple(run_config.mesh))
    ranks = Ranks(rank=dist.get_rank(), world=dist.get_world_size(), device=torch.device("cpu"), mesh=mesh)
    corpus = read_corpus(run_config)
    trainer = make_trainer(run_config, ranks, corpus, build_tiny(run_config.model, corpus.tokenizer.vocab_size))
    trainer.step(0)
    with traffic_report(trainer.model, micro_batches=run_config.micro_batches) as traffic:
        trainer.step(0)
    memory = {line.kind: line.allocated_bytes for line in memory_report(trainer.model, trainer.optimizer)}
    workspace = sum(engine_of(trainer.model).schedule.memory.workspace.values())
    calls = [(call.axis, call.operation, call.sent_bytes) for call in traffic.calls]
    return memory, workspace, sorted(calls)


def rehearsed(run_config, rank):
    from zeromesh.rehearsal.training import rehearse_training

    with mock.patch("zeromesh.rehearsal.training.build_language_model", build_tiny):
        found = rehearse_training(run_config, rank)
    assert not found.failures, found.failures
    return found


@alone(virtual=True)
def rehearse_and_compare(run_config, rank, memory, workspace, calls):
    found = rehearsed(run_config, rank)
    kinds = {kind.kind: kind.allocated_bytes for kind in found.memory.kinds}
    # Gloo's collectives work in memory of their own, a device's do not: the rest is the same, to the byte.
    assert kinds == {
        **{k: memory[k] for k in ("params", "grads", "optimizer")},
        "buffers": memory["buffers"] - workspace,
    }
    assert found.memory.predicted_bytes == found.memory.allocated_bytes
    axes = [axis.axis for axis in found.axes]
    assert set(run_config.mesh) <= set(axes)
    sent = {axis: sum(bytes_ for name, _, bytes_ in calls if name == axis) for axis in axes}
    assert {axis.axis: axis.sent_bytes for axis in found.axes} == sent
    # Not a backend's launches for each, which differ: the engine's collectives.
    count = {axis: sum(name == axis for name, _, _ in calls) for axis in axes}
    assert {axis.axis: axis.collectives for axis in found.axes} == count


@pytest.mark.parametrize("strategy", ["node=2,cluster=0 | head: node=3,cluster=1", "node=3,cluster=3k"])
def test_a_rehearsal_counts_what_real_ranks_count(tmp_path: Path, strategy: str) -> None:
    run_config = config(write_text(tmp_path), (("cluster", 2), ("node", 2)), strategy, checkpoint={})
    pool: Pool = shared()
    for rank, (memory, workspace, calls) in enumerate(pool.run(4, trained, run_config)):
        if rank in (0, 3):
            rehearse_and_compare(run_config, rank, memory, workspace, calls)


CONFIG = """
strategy = "node=3,cluster=1"
mesh = { cluster = 64, node = 8 }
cluster = "a800-8x-hdr"
[run]
directory = "out"
steps = 2
[model]
config = { model_type = "tiny" }
[data]
files = ["text/*.txt"]
seq_len = 12
holdout = 0
[batch]
global_sequences = 1024
micro = 1
[optimizer]
lr = 1e-2
"""


def test_the_command_rehearses_ranks_in_processes_of_their_own(tmp_path: Path) -> None:
    (write_text(tmp_path) / "run.toml").write_text(CONFIG)
    around = os.environ | {"PYTHONPATH": f"{FAKE_TRANSFORMERS}:{os.environ.get('PYTHONPATH', '')}"}
    arguments = ["--rank", "0", "--rank", "511", "--world", "512", "--json"]
    files = ["--report", str(tmp_path / "page.html"), "--trace", str(tmp_path / "trace.json")]
    ended = run_python(
        "-m", "zeromesh.cli", "rehearse", tmp_path / "run.toml", *arguments, *files, env=around, cwd=tmp_path
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    (other,) = found["others"]
    assert (found["world"], found["rank"], other["rank"], found["failures"]) == (512, 0, 511, [])
    memory = found["memory"]
    assert memory["predicted_bytes"] == memory["allocated_bytes"] <= memory["peak_allocated_bytes"]
    assert memory["peak_allocated_bytes"] <= memory["peak_reserved_bytes"] and memory["fits"] is True
    assert found["races"] == found["early_frees"] == [] and found["launches_per_unit"]["compute"] > 0
    assert {read["where"].split(":")[0] for read in found["host_reads"]} == {
        "zeromesh/engine/control.py",
        "zeromesh/train/loop.py",
    }
    assert found["bytes_by_axis"] == found["predicted_bytes_by_axis"] and set(found["bytes_by_axis"]) == set(MESH)
    assert found["step_s"] > 0 and found["host_s"] > 0
    assert "as rank 0 of 512" in (tmp_path / "page.html").read_text()
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert not (tmp_path / "out").exists()
