"""A step of `zeromesh train` on a device: the host's waits."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from tests.dist.train.harness import Tiny, config, write_text
from tests.simdev.clean import SOURCES, require_clean
from tests.simdev.ranks import alone
from zeromesh import simdev
from zeromesh.launch.ranks import Ranks
from zeromesh.train.corpus import read_corpus
from zeromesh.train.loop import make_trainer


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
