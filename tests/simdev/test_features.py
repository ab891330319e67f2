"""Models and their checkpoints on device tensors of four processes: as on the host, and in order."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zeromesh as zm
from tests.dist.checkpoint.models import make, train
from tests.dist.features.test_precision import skip_together
from tests.dist.train.harness import Tiny, config, write_text
from tests.simdev.clean import SOURCES, require_clean
from tests.simdev.ranks import alone, on_devices
from zeromesh import simdev
from zeromesh.checkpoint.checkpoints import Checkpoints
from zeromesh.launch.ranks import Ranks
from zeromesh.train.corpus import read_corpus
from zeromesh.train.loop import make_trainer

MESH = (("cluster", 2), ("node", 2))
PAIR = (("node", 2),)
"""For features that no second axis changes."""


@on_devices(2)
def test_all_ranks_skip_a_step_together():
    for kind in ("foreach AdamW", "fused AdamW"):
        with simdev.Checker() as checker:
            skip_together(kind, True, ["node=3"], "simdev")
        require_clean(checker, kind)


@on_devices(2)
def test_what_is_parked_on_the_host_comes_back():
    with simdev.Checker() as checker:
        found = []
        for parks in False, True:
            model, optimizer = make(PAIR, "node=3", device="simdev")
            train(model, optimizer, 2)
            if parks:
                optimizer.zero_grad()
                with zm.parked(model, optimizer):
                    assert all(
                        tensor.device.type == "cpu" for state in optimizer.state.values() for tensor in state.values()
                    )
            found.append(train(model, optimizer, 2, first=2))
    assert found[0] == found[1]
    require_clean(checker, "parking")


@on_devices(2)
def test_what_lies_on_the_host_is_saved_and_loaded(tmp_path):
    """In the background, while steps on the host change it: to the bit, and nothing races."""
    layouts = (
        "host=1,node=3",
        "host=2,node=3;step=device",
        "node=3",
        "host=3,node=3",
        "host[50%]=1,node=3;step=device",
        "host=1,node=3",
    )
    with simdev.Checker() as checker:
        model, optimizer = make(PAIR, layouts[0], device="simdev")
        train(model, optimizer, 2)
        for number, layout in enumerate(layouts[1:]):
            directory = tmp_path / str(number)
            with Checkpoints(directory, model, optimizer) as checkpoints:
                checkpoints.open()
                saver, arena = checkpoints._saver, None
                assert saver is not None
                if layouts[number] == "node=3":  # none of it lies on the host: all is copied to memory that is pinned
                    assert saver._reserving is not None
                    saver._reserving.result()
                    arena = saver._staging._arena
                checkpoints.save(2)
                assert arena is None or (arena is saver._staging._arena and arena.memory.is_pinned())
                wanted = zm.full_state_dict(model)
                train(model, optimizer, 1, first=2)
            other, again = make(PAIR, layout, seed=1, device="simdev")
            with Checkpoints(directory, other, again) as checkpoints:
                checkpoints.load("auto")
            got = zm.full_state_dict(other)
            shared = [name for name in wanted if not name.startswith("norm.running")]  # which each rank has its own of
            assert wanted.keys() == got.keys()
            assert all(torch.equal(got[name], wanted[name]) for name in shared)
            model, optimizer = other, again
    require_clean(checker, "saving shards on the host")


@on_devices(2)
def test_owners_step_on_the_device_where_slices_lie_on_the_host():
    """Before or after an optimizer whose slices come to the device: to the bit, and nothing races."""
    mesh, found = init_device_mesh("simdev", (2,), mesh_dim_names=("node",)), []
    for strategy in ("node=3", "host=1,node=3;step=device", "host=3,node=3;step=device", "host=2,node=1"):
        for order in (1, -1) if "device" in strategy else (1,):
            with simdev.Checker() as checker:
                torch.manual_seed(0)
                blocks = (nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh()) for _ in range(3))
                model = zm.shard(nn.Sequential(*blocks), mesh, strategy)
                matrices = [param for param in model.parameters() if param.ndim == 2]
                others = [param for param in model.parameters() if param.ndim != 2]
                muon = zm.by_owner(torch.optim.Muon, matrices, lr=0.02)
                assert all(m.whole is None or m.whole.device.type == "simdev" for b in muon.buckets for m in b.members)
                optimizers = [muon, torch.optim.AdamW(others, lr=0.01, fused=False)][::order]
                for _ in range(2):
                    model(torch.ones(2, 8, device="simdev")).square().sum().backward()
                    for optimizer in optimizers:
                        optimizer.step()
                    zm.zero_grad(model)
                found.append(zm.full_state_dict(model))
            require_clean(checker, strategy)
    for other in found[1:]:
        assert all(torch.equal(value, other[name]) for name, value in found[0].items())


# ---- A step of `zeromesh train` on a device: the host's waits


@pytest.mark.parametrize("strategy", ["node=3,cluster=1", "node=3@int8/int4+ef,cluster=0"])
@alone()
def test_a_step_waits_for_the_device_exactly_once(tmp_path, strategy):
    """For loss, norm and signals together, at its end. The words on which gradients there were have a stream of their
    own; nothing else is read, and nothing is sent from memory that is not pinned."""
    simdev.counting_group(0, 4)
    mesh = init_device_mesh("simdev", (2, 2), mesh_dim_names=("cluster", "node"))
    run = config(write_text(tmp_path), (("cluster", 2), ("node", 2)), strategy, checkpoint={})
    corpus = read_corpus(run)
    ranks = Ranks(rank=0, world=4, device=torch.device("simdev", 0), mesh=mesh)
    trainer = make_trainer(run, ranks, corpus, Tiny(corpus.tokenizer.vocab_size))
    trainer.step(0)
    for step in (1, 2):
        with simdev.Checker() as checker:
            assert trainer.step(step).finite
        require_clean(checker, strategy)
        computation = int(torch.accelerator.current_stream().stream_id)
        reads = [(read.where.removeprefix(f"{SOURCES}/").split(":")[0], read.stream) for read in checker.host_reads]
        assert [where for where, stream in reads if stream == computation] == ["train/loop.py"], reads
        assert [where for where, stream in reads if stream != computation] == ["engine/control.py"], reads
        assert not checker.host_waits, [str(wait) for wait in checker.host_waits]
