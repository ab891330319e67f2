"""A script as users write it, started as users start it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
trainer.train()
trainer.save_model("tuned")
again = zm.from_pretrained(hf.AutoModelForCausalLM, "tuned")
Trainer(model=again, args=arguments, train_dataset=trainer.train_dataset, sharding=trainer.sharding).train(
    resume_from_checkpoint="run/checkpoint-2"
)
"""


@pytest.mark.timeout(120)
def test_torchrun_trains_a_script_with_a_planned_strategy(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert (tmp_path / "tuned" / "model.safetensors").is_file() and (tmp_path / "run" / "checkpoint-4").is_dir()
