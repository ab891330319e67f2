"""For all that may be wrong with configuration or environment: one message, exit code 2, and nothing changed on disk.

All in this process: the command's `main` is called as the console script calls it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from zeromesh.cli.app import main
from zeromesh.train.config import TrainConfig

CONFIG = """
strategy = "node=3"
mesh = { node = 1 }
[run]
directory = "out"
steps = 2
threads = 1
[model]
config = { model_type = "tiny" }
[data]
files = ["text/*.txt"]
seq_len = 8
holdout = 0
[batch]
global_sequences = 2
micro = 2
[optimizer]
lr = 1e-2
"""

Prepare = Callable[[Path], object]


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "text").mkdir()
    for number in range(4):
        (tmp_path / "text" / f"{number}.txt").write_text(f"text number {number}\n" * 10)
    (tmp_path / "run.toml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    fake = Path(__file__).parent / "fake" / "transformers" / "__init__.py"
    spec = importlib.util.spec_from_file_location("transformers", fake)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "transformers", module)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def train(monkeypatch: pytest.MonkeyPatch, *overrides: str, file: str = "run.toml") -> int:
    arguments = [part for override in overrides for part in ("--set", override)]
    monkeypatch.setattr(sys, "argv", ["zeromesh", "train", file, *arguments])
    threads = torch.get_num_threads()
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        torch.set_num_threads(threads)
    return 0


def on_disk(directory: Path) -> dict[str, str]:
    """Everything there is, with a digest of its content."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        if path.is_file()
        else "directory"
        for path in sorted(directory.rglob("*"))
    }


def refused(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *overrides: str,
    file: str = "run.toml",
) -> str:
    """The message, after all that is common to refusals has been checked."""
    before = on_disk(directory)
    capsys.readouterr()
    assert train(monkeypatch, *overrides, file=file) == 2
    said = capsys.readouterr()
    assert said.err.startswith("zeromesh: ") and said.err.count("zeromesh: ") == 1
    assert "Traceback" not in said.err
    assert said.out == ""
    assert on_disk(directory) == before
    return said.err


def write(name: str, text: str) -> Prepare:
    return lambda directory: (directory / name).write_text(text)


def replaced(old: str, new: str) -> Prepare:
    return write("run.toml", CONFIG.replace(old, new))


def without(directory: Path) -> None:
    (directory / "run.toml").unlink()


FILES: list[tuple[Prepare, str]] = [
    (without, "run.toml: cannot be read as a configuration: No such file"),
    (write("run.toml", ""), "strategy is missing"),
    (write("run.toml", "[[["), "run.toml: not valid TOML"),
    (replaced("[batch]", "[[batch]]"), "run.toml: batch: "),
    (replaced("seq_len = 8", ""), "data.seq_len is missing; set it in the file or with --set"),
]


KEYS = [
    ("trian.steps=3", "unknown key trian; known: run, model, "),
    ("run.device=tpu", "are to have a device of type tpu, where torch sees"),
    ("optimizer.betas=[0.9]", "optimizer.betas.1 is missing"),
    ("dtypes.grad=bf16", "set dtypes.grad and dtypes.master alike"),
    ("mesh=2", "mesh: input should be a valid dictionary"),
    ("strategy=hsdp", "preset hsdp has 2 levels, the mesh has 1: node"),
    ("strategy=node[2]=3,node[*]=1", "needs node to have a multiple of 2 ranks; this mesh has 1"),
]


RUNS: list[tuple[Prepare, Sequence[str], str]] = [
    (write("plan.json", '{"zeromesh_plan": 9}'), ["strategy=plan.json"], "plan format must be 1; got 9"),
    (write("cluster.toml", "name = 'x'\n[device]\n"), ["strategy=auto", "cluster=cluster.toml"], "cluster.toml: "),
    (str, ["strategy=auto", "cluster=nowhere"], "nowhere"),
    (str, ["data.files=['nothing/*.txt']"], "data.files: "),
    (str, ["data.seq_len=100000"], "the training files must hold at least data.seq_len + 1 = 100001 tokens"),
    (
        str,
        ["data.holdout=0.0001", "eval.every=1"],
        "data.holdout = 0.0001 leaves 4 documents to train on and 0 held out",
    ),
    (
        str,
        ["batch.global_sequences=1000"],
        "a step takes batch.global_sequences = 1000 sequences of data.seq_len = 8 tokens, and the training data have",
    ),
    (
        write("bad.jsonl", '{"text": "a"}\n{\n{\n{"messages": [{"role": "user"}]}\n'),
        ["data.files=['*.jsonl']"],
        "bad.jsonl cannot be read: Expecting property name",
    ),
    (str, ["model={pretrained='nowhere'}"], "nowhere is no directory"),
    (str, ["data.tokenizer=nowhere/"], "nowhere is no directory with a Hugging Face tokenizer"),
    (str, ["data.tokenizer=bpe:20"], "data.tokenizer: bpe needs at least 257 tokens"),
    (write("tokenizer.json", "{}"), ["data.tokenizer=tokenizer.json"], "tokenizer.json is not a tokenizer.json"),
    (str, ["data.tokenizer=missing.json"], "missing.json: cannot be read as data.tokenizer"),
    (str, ["model.config=config.json"], "config.json: cannot be read as model.config"),
    (write("config.json", "x"), ["model.config=config.json"], "config.json: not JSON"),
    (write("config.json", "[]"), ["model.config=config.json"], "must hold a JSON object; got list"),
    (write("out", ""), [], "run.directory: cannot write "),
    (write("file", ""), ["run.directory=file/out"], "run.directory: cannot write "),
    (str, ["checkpoint.resume=nowhere/step-00000001"], "step-00000001 is no checkpoint"),
    (str, ["checkpoint.resume=text"], "text is no checkpoint"),
]


CASES: list[tuple[Prepare, Sequence[str], str]] = [
    *((prepare, (), message) for prepare, message in FILES),
    *((str, (override,), message) for override, message in KEYS),
    *RUNS,
]


@pytest.mark.parametrize(("prepare", "overrides", "message"), CASES)
def test_wrong_input_is_one_message(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    prepare: Prepare,
    overrides: Sequence[str],
    message: str,
) -> None:
    prepare(directory)
    assert message in refused(directory, monkeypatch, capsys, *overrides)


def test_a_launchers_processes_are_the_meshs_ranks(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    assert "the environment has RANK but not WORLD_SIZE" in refused(directory, monkeypatch, capsys)
    monkeypatch.setenv("WORLD_SIZE", "2")
    said = refused(directory, monkeypatch, capsys)
    assert "mesh node=1 has 1 ranks, but the launcher started 2 processes" in said
    monkeypatch.setenv("RANK", "1")  # all ranks read the same file: rank 0 says it
    assert train(monkeypatch) == 2 and capsys.readouterr() == ("", "")
    meshes: list[dict[str, int]] = []

    def note(config: TrainConfig, _: object) -> int:
        meshes.append(dict(config.mesh))
        return 0

    monkeypatch.setattr("zeromesh.cli.train._run_rank", note)
    for name, value in {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert train(monkeypatch, "faults.resize=true") == 0 and meshes == [{"node": 2}]


def test_a_checkpoint_of_another_model(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(monkeypatch, "checkpoint.every=1") == 0
    assert os.listdir(directory / "out" / "checkpoints")
    elsewhere = ["run.directory=elsewhere", "checkpoint.resume=out/checkpoints", "checkpoint.every=1"]
    for overrides in ([], elsewhere):
        said = refused(directory, monkeypatch, capsys, "run.steps=3", "model.config.layers=1", *overrides)
        assert "is a checkpoint of another model" in said
        assert "blocks.1.weight: in the checkpoint, not in the model" in said


def test_a_tokenizer_that_was_trained_on_other_text(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(monkeypatch, "checkpoint.every=2", "data.tokenizer=bpe:265") == 0
    (directory / "text" / "4.txt").write_text("words that were not there before\n" * 10)
    elsewhere = ["run.directory=elsewhere", "checkpoint.resume=out/checkpoints", "run.steps=3"]
    for overrides in (["run.steps=3"], elsewhere):
        said = refused(directory, monkeypatch, capsys, "data.tokenizer=bpe:265", *overrides)
        assert "step-00000002 needs the digest of the tokenizer" in said
        assert "set data.tokenizer to the tokenizer.json in that run's directory" in said
    with pytest.warns(UserWarning, match="with other data or batches, so samples .* number of training tokens was"):
        assert train(monkeypatch, "data.tokenizer=out/tokenizer.json", *elsewhere) == 0
