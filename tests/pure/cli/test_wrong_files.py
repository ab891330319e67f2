"""Files that no person would write: every command answers with one message and exit code 2, in time.

All in this process: the command's `main` is called as the console script calls it.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zeromesh.errors import InputError
from zeromesh.files.users import MAX_BYTES, read_text
from zeromesh.train.config import load_config

CLUSTER = """
name = "c"
[device]
name = "d"
memory = "80 GB"
cores = 2.0
peak.bf16 = "312 TFLOP/s"
[[level]]
name = "node"
size = 8
bandwidth = "200 GB/s"
latency = "6 us"
host_rate = "1.2 GB/s"
shares = { all_reduce = 1.3 }
"""
MODEL = {"model_type": "mixtral", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
MODEL |= {"num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 1000, "num_local_experts": 4}
MODEL |= {"sliding_window": 32, "tie_word_embeddings": False}
RUN = """
strategy = "node=3"
mesh = { node = 2 }
[run]
directory = "out"
steps = 3
threads = 1
timeout_s = 60.0
[model]
config = { model_type = "gpt2" }
[data]
files = ["text/*.txt"]
seq_len = 16
[batch]
global_sequences = 5
micro = 2
[optimizer]
lr = 1e-2
betas = [0.9, 0.95]
"""
DIGITS = "9" * 5000
VALUES = (
    *("0", "-1", "1e30", "1e999", "-inf", "nan", "9" * 18, "9" * 30, DIGITS, "true", "null", "[]", "{}", '""', "0x_"),
    *('"~nosuchuser/x"', '"\\u0000"', '"9e999 GB"', '"int8[9]"', f'"node[{DIGITS}]=3"', f'"{DIGITS}"'),
    *("[" * 5000, "[" * 200 + "]" * 200, "{a=" * 3000 + "1" + "}" * 3000, "\udcff", '"' + "é" * 300 + '"', "[[[[1]]]]"),
    '"' + "x/" * 3000,
)


Answer = Callable[..., tuple[int, str]]


@pytest.fixture
def answer(zeromesh: Callable[..., tuple[int, str, str]]) -> Answer:
    """Exit code and complaint of a command."""
    return lambda *arguments: zeromesh(*arguments)[::2]  # type: ignore[return-value]


def simulate(answer: Answer, model: str | Path, cluster: str | Path, strategy: str = "node=3") -> tuple[int, str]:
    options = ("--seq-len", "64", "--global-batch-tokens", "4096", "--strategy", strategy)
    return answer("simulate", "--model", model, "--cluster", cluster, *options)


def mutated(draw: random.Random, text: str, mark: str) -> bytes:
    """`text` with a value replaced by one of `VALUES`, cut short, or with some bytes changed."""
    way = draw.random()
    if way < 0.8:
        lines = text.splitlines()
        number = draw.choice([index for index, line in enumerate(lines) if mark in line])
        comma = "," * lines[number].endswith(",")
        lines[number] = f"{lines[number].split(mark)[0]}{mark}{draw.choice(VALUES)}{comma}"
        text = "\n".join(lines)
    data = bytearray(text.encode(errors="surrogateescape"))
    if way >= 0.9:
        del data[draw.randrange(len(data)) :]
    elif way >= 0.8:
        for _ in range(3):
            data[draw.randrange(len(data))] = draw.randrange(256)
    return bytes(data)


def reached(code: int, error: str) -> None:
    assert code in (0, 2), error
    assert code == 0 or error.startswith("zeromesh: "), error


@pytest.mark.parametrize("seed", range(2))
def test_clusters_and_models(answer: Answer, tmp_path: Path, seed: int) -> None:
    draw, file = random.Random(seed), tmp_path / "cluster.toml"
    model, good = tmp_path / "config.json", tmp_path / "good.toml"
    good.write_text(CLUSTER)
    for _ in range(25):
        file.write_bytes(mutated(draw, CLUSTER, " = "))
        reached(*answer("clusters", file))
        model.write_bytes(mutated(draw, json.dumps(MODEL, indent=0), ": "))
        reached(*simulate(answer, model, good))


@pytest.mark.parametrize("seed", range(3))
def test_configurations_and_overrides(tmp_path: Path, seed: int) -> None:
    """Loading starts no run; files that it lets through are numbered so that a run can be tried."""
    draw, file = random.Random(seed), tmp_path / "run.toml"
    for _ in range(60):
        file.write_bytes(mutated(draw, RUN, " = "))
        key = draw.choice(("run.threads", "strategy", "run.directory", "data.seq_len", "mesh.node", "model.config"))
        value = draw.choice(VALUES).encode(errors="surrogateescape").decode(errors="replace")
        try:
            config = load_config(file, draw.choice(([], [f"{key}={value}"])))
        except InputError as error:
            assert len(str(error)) < 100_000
        else:
            assert (config.run.threads or 1) <= 4096 and config.data.seq_len < 2**31


@pytest.mark.parametrize("kind", ["device", "pipe", "directory", "large", "binary"])
def test_only_regular_files_of_text_are_read(answer: Answer, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "file.toml"
    if kind == "device":
        path = Path("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "large":
        path.touch()
        os.truncate(path, MAX_BYTES + 1)
    else:
        path.write_bytes(b'name = "\xff"')
    words = {"large": "has at most 64 MiB", "binary": "not UTF-8 text"}
    expected = words.get(kind, f"must be a regular file; this is a {kind}")
    with pytest.raises(InputError, match=expected):
        read_text(path, kind="a file")
    model = tmp_path / "config.json"
    model.symlink_to(path)
    for code, error in (answer("clusters", path), simulate(answer, model, "a100-8x-100g"), answer("train", path)):
        assert code == 2 and (expected in error or kind == "directory"), error


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 10**9}, "layers must be at most 1000, got 1000000000"),
        ({"num_local_experts": 10**9}, "experts must be at most 10000"),
        ({"hidden_size": 2**40, "num_attention_heads": 2**40}, "hidden must be at most 16777216"),
        ({"model_type": []}, "model_type [] has no reader"),
        ({"vocab_size": 10**40}, "whole numbers have at most 64 bits"),
    ],
)
def test_absurd_sizes_are_named(answer: Answer, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    good, model = tmp_path / "good.toml", tmp_path / "config.json"
    good.write_text(CLUSTER)
    model.write_text(json.dumps(MODEL | change))
    code, error = simulate(answer, model, good)
    assert code == 2 and message in error, error
    code, error = simulate(answer, "llama-7b", good, f"node[{DIGITS}]=3")
    assert code == 2 and "expected axis=stage" in error
