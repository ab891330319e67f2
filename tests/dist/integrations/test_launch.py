"""A script as users write it, in the environment in which `accelerate launch` starts it."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from tests.dist.integrations.hugging import launched
from tests.dist.pool import Pool, on_ranks

SCRIPT = """
import torch, transformers as hf, zeromesh as zm
from zeromesh.integrations.transformers import Trainer

config = hf.LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
tokens = torch.arange(8)
arguments = hf.TrainingArguments(
    output_dir="run", max_steps=2, save_steps=1, per_device_train_batch_size=1, report_to=[], use_cpu=True
)
trainer = Trainer(
    model=hf.LlamaForCausalLM(config),
    args=arguments,
    train_dataset=[{"input_ids": tokens, "labels": tokens}] * 16,
    sharding=zm.Sharding(
        strategy="auto",
        mesh={"node": 2},
        cluster="gloo-laptop",
        workload=zm.Workload(seq_len=8, global_batch_tokens=16, micro_batch=1),
    ),
)
assert arguments.world_size == 2 and trainer.accelerator.mixed_precision == "bf16"
trainer.train()
trainer.save_model("tuned")
again = zm.from_pretrained(hf.AutoModelForCausalLM, "tuned")
Trainer(model=again, args=arguments, train_dataset=trainer.train_dataset, sharding=trainer.sharding).train(
    resume_from_checkpoint="run/checkpoint-1"
)
"""


CONFIG = """
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
machine_rank: 0
main_process_port: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 2
use_cpu: true
"""
"""As `accelerate config` writes it; of MULTI_CPU `accelerate launch` starts one process, unless there is MPI."""


@on_ranks(2)
def test_a_script_trains_with_a_planned_strategy_as_accelerate_starts_it(tmp_path: Path) -> None:
    """On ranks that are there already, in the place of torchrun's, to which the launcher hands over."""
    from accelerate.commands.launch import launch_command, launch_command_parser

    (tmp_path / f"config-{dist.get_rank()}.yaml").write_text(CONFIG)
    arguments = launch_command_parser().parse_args(
        ["--config_file", f"{tmp_path}/config-{dist.get_rank()}.yaml", "train.py"]
    )
    before = os.getcwd()
    started = mock.patch("torch.distributed.run.run", lambda _: exec(SCRIPT, {"__name__": "__main__"}))
    with launched(), started, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as in a user's process
        os.chdir(tmp_path)
        try:
            launch_command(arguments)
        finally:
            os.chdir(before)
    assert (tmp_path / "tuned" / "model.safetensors").is_file() and (tmp_path / "run" / "checkpoint-2").is_dir()


# ---- The example notebook: its cells before the launcher, and its function as each process runs it. Where nbclient and
# ipykernel are installed, all of it runs in a kernel.


TIMEOUT_S = 600
NOTEBOOK = Path(__file__).parents[3] / "examples/notebook.ipynb"


def cells() -> list[str]:
    return [
        "".join(cell["source"]) for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"
    ]


def test_the_last_cell_launches_the_function_before_it() -> None:
    *_, function, launch = cells()
    assert function.startswith("def train(") and "notebook_launcher(train, num_processes=2)" in launch
    assert all(cell.get("outputs", []) == [] for cell in json.loads(NOTEBOOK.read_text())["cells"])


@on_ranks(2)
def test_its_function_trains() -> None:
    names: dict[str, Any] = {}
    with launched():
        exec(cells()[2], names)
        names["train"](steps=2)


# ---- The example of torchtitan's Trainer, on ranks that are there already: it takes the process group that it finds


EXAMPLE = Path(__file__).parents[3] / "examples/torchtitan_llama.py"


def example(steps: int, folder: Path) -> str:
    """Runs the example; returns the output of this rank."""
    spec = importlib.util.spec_from_file_location("torchtitan_llama", EXAMPLE)
    assert spec is not None and spec.loader is not None
    names = {"RANK": dist.get_rank(), "LOCAL_RANK": dist.get_rank(), "WORLD_SIZE": dist.get_world_size()}
    arguments = [str(EXAMPLE), "--check", "--steps", str(steps), "--folder", str(folder)]
    with (
        warnings.catch_warnings(),
        mock.patch.dict(os.environ, {name: str(value) for name, value in names.items()}),
        mock.patch.object(sys, "argv", arguments),
        contextlib.redirect_stdout(io.StringIO()) as printed,
    ):
        warnings.simplefilter("ignore")  # torchtitan's, and torch's about its calls
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        module.main()
    return printed.getvalue()


def test_torchtitans_trainer_gives_plain_losses_and_resumes_on_fewer_ranks(tmp_path: Path) -> None:
    """The example compares losses and norms itself, to 3e-5 of them, and fails where they differ."""
    pytest.importorskip("torchtitan")
    own = Pool()  # torchtitan changes settings of its process
    try:
        for ranks, steps, compared in ((4, 1, (1,)), (2, 2, (2,))):
            printed, *_ = own.run(ranks, example, steps, tmp_path, spoils=True)
            found = [line for line in printed.splitlines() if "plainly" in line]
            assert [int(line.split()[1]) for line in found] == list(compared)
    finally:
        own.remove()


def test_all_of_it_runs_in_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    client, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "yes")
    book = nbformat.read(NOTEBOOK, as_version=4)
    client.NotebookClient(book, timeout=TIMEOUT_S, kernel_name="python3").execute()
    plan, step, _, printed = (cell.outputs for cell in book.cells if cell.cell_type == "code")
    for (shown,) in (plan, step):
        assert shown.data["text/html"].startswith("<iframe srcdoc=") and len(shown.data["text/plain"]) < 400
    text = "".join(output.get("text", "") for output in printed)
    assert "predicted bytes  allocated bytes" in text and "loss " in text
