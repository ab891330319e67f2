"""In place of transformers, in processes that a test starts: it is imported in no time, and its model breaks on demand.

`PYTHONPATH` puts it before the real one. It has the names that `zeromesh.integrations.language_models` uses.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from typing import Any

import torch
from torch import Tensor, nn

from zeromesh.integrations.elastic import asked_by

if "RANK" in os.environ:
    # A test that gives up kills the launcher; torchrun's processes would live on.
    _PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

DEFAULTS = {"vocab_size": 0, "hidden": 8, "layers": 2, "faults": []}


class Config:
    def __init__(self, **fields: Any) -> None:
        self.fields = DEFAULTS | fields

    def to_dict(self) -> dict[str, Any]:
        return dict(self.fields)


CONFIG_MAPPING = {"tiny": Config}


class AutoConfig:
    @staticmethod
    def for_model(model_type: str, **fields: Any) -> Config:
        return CONFIG_MAPPING[model_type](**fields)


class Output(dict[str, Tensor]):
    """As a Hugging Face model's: a mapping with attributes."""

    @property
    def logits(self) -> Tensor:
        return self["logits"]


class Tiny(nn.Module):
    """A residual network that makes each of its `faults`, "KIND RANK START STEP".

    Kinds: kill (SIGKILL to itself), stop (SIGSTOP to itself), preempt (SIGTERM to its parent, until it comes back),
    interrupt (SIGINT to its parent, likewise), insist (SIGINT to its parent until it is ended).
    START counts the launcher's starts from 0. STEP counts forwards in training since then, the first is 1.
    """

    def __init__(self, vocab_size: int, hidden: int, layers: int, faults: list[str]) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, hidden)
        self.blocks = nn.ModuleList([nn.Linear(hidden, hidden) for _ in range(layers)])
        self.head = nn.Linear(hidden, vocab_size)
        self.faults = faults
        self.forwards = 0

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Output:
        self.forwards += self.training
        where_now = os.environ.get("RANK", "0"), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), str(self.forwards)
        for fault in self.faults:
            kind, *where = fault.split()
            if self.training and tuple(where) == where_now:
                _break(kind)
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        return Output(logits=self.head(hidden))


def _break(kind: str) -> None:
    if kind in ("kill", "stop"):
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[kind])
        return
    os.kill(os.getppid(), signal.SIGTERM if kind == "preempt" else signal.SIGINT)
    while kind == "insist" or not asked_by():
        time.sleep(0.01)
        if kind == "insist":
            os.kill(os.getppid(), signal.SIGINT)


class AutoModelForCausalLM:
    @staticmethod
    def from_config(config: Config) -> Tiny:
        return Tiny(**config.fields)
