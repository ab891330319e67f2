"""A script as users write it, in the environment in which `accelerate launch` starts it."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from unittest import mock

import torch.distributed as dist

from tests.dist.integrations.hugging import launched
from tests.dist.pool import on_ranks

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
