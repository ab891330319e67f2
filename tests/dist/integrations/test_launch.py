"""A script as users write it, started as users start it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import torch, transformers as hf, zeromesh as zm
from zeromesh.integrations.transformers import Trainer

config = hf.LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
tokens = torch.arange(8)
arguments = hf.TrainingArguments(
    output_dir="run", max_steps=4, save_steps=2, per_device_train_batch_size=1, report_to=[], use_cpu=True
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
    resume_from_checkpoint="run/checkpoint-2"
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


def test_a_script_trains_with_a_planned_strategy_as_accelerate_starts_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "config.yaml").write_text(CONFIG)
    starting = ["-m", "accelerate.commands.accelerate_cli", "launch", "--config_file", "config.yaml"]
    command = [sys.executable, *starting, "train.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert (tmp_path / "tuned" / "model.safetensors").is_file() and (tmp_path / "run" / "checkpoint-4").is_dir()
