"""One TOML file gives one frozen configuration; all that is wrong in it is said in one message."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from zeromesh.errors import ConfigError, InputError, MeshError
from zeromesh.settings import valid_keys
from zeromesh.strategy import Strategy
from zeromesh.strategy.plan import Plan
from zeromesh.train.config import TrainConfig, load_config

MINIMAL = """
strategy = "node=3,cluster=1"
mesh = { cluster = 2, node = 2 }
[run]
directory = "out"
steps = 10
[model]
config = { model_type = "llama" }
[data]
files = ["text/*.py"]
seq_len = 32
[batch]
global_sequences = 8
micro = 2
[optimizer]
lr = 1e-3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(MINIMAL)
    return path


def test_minimal_file_has_defaults_and_absolute_paths(file: Path) -> None:
    config = load_config(file)
    assert config.world == 4
    assert config.run.directory == file.parent / "out"
    assert config.data.files == (str(file.parent / "text/*.py"),)
    assert (config.checkpoint.every, config.checkpoint.resume) == (0, "auto")
    assert [axis.name for axis in config.layouts()[""].axes] == ["node", "cluster"]
    # A configuration survives JSON.
    config = load_config(file, ["data.tokenizer=bpe:512", "optimizer.betas=[0.8, 0.9]", "optimizer.clip_norm=inf"])
    assert TrainConfig.model_validate_json(config.model_dump_json()) == config
    # Paths are relative to the file.
    found = load_config(file, ['data.validation=["here.jsonl"]', "run.export=out", 'data.files=["{stdlib}/*.py"]'])
    assert found.data.validation == (str(Path.cwd() / "here.jsonl"),)
    assert found.run.export == Path.cwd() / "out"
    assert found.data.files == ("{stdlib}/*.py",)  # which is left for the run


def test_overrides_take_toml_values_and_plain_text(file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    overrides = ["run.steps=3", "strategy=node=0,cluster=2", "mesh.node=4", "model.config.hidden_size=64"]
    config = load_config(file, [*overrides, "run.directory=elsewhere", "eval.every=5"])
    assert (config.run.steps, config.strategy, config.mesh) == (3, "node=0,cluster=2", {"cluster": 2, "node": 4})
    assert config.model.config == {"model_type": "llama", "hidden_size": 64}
    assert (config.run.directory, config.eval.every) == (tmp_path / "elsewhere", 5)


def test_strategy_may_be_a_plan(file: Path) -> None:
    plan = Plan(strategy=Strategy.parse("node=2,cluster=0"), mesh=(("node", 2), ("cluster", 2)), micro_batch=2)
    (file.parent / "plan.json").write_text(plan.to_json())
    file.write_text(file.read_text().replace("node=3,cluster=1", "plan.json"))
    assert load_config(file).strategy == "node=2,cluster=0"
    (file.parent / "plan.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"plan.json: not a zeromesh plan"):
        load_config(file)
    (file.parent / "plan.json").unlink()
    with pytest.raises(ConfigError, match=r"plan.json: cannot be read as a plan: No such file"):
        load_config(file)


def test_a_plan_of_other_choices_is_refused_with_each_of_them(file: Path) -> None:
    dtypes = {"param_dtype": "bf16", "grad_dtype": "bf16", "master_dtype": "bf16"}
    sizes: dict[str, Any] = {"micro_batch": 8, "micro_batches": 3, "seq_len": 64, "recompute": "full"}
    mesh = (("node", 4), ("cluster", 2))
    plan = Plan(strategy=Strategy.parse("node=2,cluster=0"), mesh=mesh, **sizes, **dtypes)
    (file.parent / "plan.json").write_text(plan.to_json())
    planned = [f"strategy={file.parent}/plan.json", "mesh.node=4", "batch.micro=8", "dtypes.param=bf16"]
    planned += ["batch.global_sequences=190", "data.seq_len=64"]
    planned += ["model.activation_checkpointing=full", "dtypes.grad=bf16", "dtypes.master=bf16"]
    assert load_config(file, planned).strategy == "node=2,cluster=0"
    others = (
        "mesh = cluster=2 x node=2 (planned: cluster=2 x node=4), batch.micro = 2 (planned: 8), "
        "micro-batches of a step, from batch.global_sequences = 1 (planned: 3), data.seq_len = 32 (planned: 64), "
        "model.activation_checkpointing = none (planned: full), dtypes.param = fp32 (planned: bf16), "
        "dtypes.reduce = fp32 (planned: bf16), dtypes.grad = fp32 (planned: bf16), dtypes.master = fp32 (planned: "
        "bf16). Set them"
    )
    with pytest.raises(InputError, match=re.escape(others)):
        load_config(file, planned[:1])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.steps=0", "run.steps: input should be greater than 0; got 0"),
        ("run.steps=many", "run.steps: input should be a valid integer"),
        (f"run.seed={2**63}", f"run.seed: input should be less than {2**63}"),
        ("run.timeout_s=inf", "run.timeout_s: input should be a finite number; got inf"),
        ("optimizer.lr=inf", "optimizer.lr: input should be a finite number; got inf"),
        ("optimizer.clip_norm=nan", "optimizer.clip_norm: input should be greater than or equal to 0; got nan"),
        ("batch.micro=-1", "batch.micro: input should be greater than 0; got -1"),
        ("data.tokenizer=words", "data.tokenizer: "),
        ("dtypes.param=fp8", "dtypes.param: input should be 'fp64', 'fp32', 'bf16' or 'fp16'; got 'fp8'"),
        ("mesh={}", "mesh: "),
        ("mesh.node=0", "mesh.node: input should be greater than 0"),
        ("run.steps.x=1", "run.steps is 10, not a table"),
        ("steps", "--set must be key.path=value"),
        ("=3", "--set must be key.path=value"),
        ("optimizer.weight_decy=0.1", "unknown key optimizer.weight_decy; did you mean optimizer.weight_decay?"),
        ("run.lr=0.1", "unknown key run.lr; did you mean optimizer.lr?"),
        ("data.seed=1", "did you mean run.seed?"),
        ("step=3", "unknown key step; did you mean run.steps?"),
        ("run.steps=0 batch.mirco=1", "batch.mirco"),  # every mistake is listed
        ("run.steps=0 batch.mirco=1", "run.steps"),
        ("model.pretrained=there", "either model.config, to start from random values, or model.pretrained"),
        ("model.trainable=lora", 'must be "all", "lora:RANK", as in "lora:16", or a list of patterns'),
        ("model.trainable=[]", "no pattern would leave nothing to train"),
        ("model.activation_checkpointing=some", "'none', 'selective' or 'full'"),
        ("eval.every=1 data.holdout=0", "set data.holdout to a fraction above 0, or name files"),
        ("samples.every=1", "samples.every needs samples.prompts"),
        ("strategy=node=3,rack=1", "rack"),
        ("strategy=node=9,cluster=1", "stage must be one of"),
        ("strategy=node=3,cluster=3;collective=flat", "collective=flat can only be simulated"),
        ("faults.nonfinite=rollback", "needs checkpoints to go back to: set checkpoint.every"),
        ("faults.restarts=2", "needs checkpoints to go back to: set checkpoint.every"),
        ("strategy=auto", 'strategy = "auto" needs a cluster to plan for'),
        ("strategy=auto cluster=elsewhere.toml", "elsewhere.toml"),
        ("strategy=auto cluster=gloo-laptop", "levels of cluster 'gloo-laptop', outermost first node; the mesh has"),
    ],
)
def test_invalid_value_names_key_requirement_and_value(file: Path, override: str, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        load_config(file, override.split())


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read as a configuration: No such file"):
        load_config(tmp_path / "missing.toml")
    bad = tmp_path / "bad.toml"
    bad.write_text("steps = = 3")
    with pytest.raises(ConfigError, match="not valid TOML: "):
        load_config(bad)
    # Where a table is missing, the error says which to add.
    path = tmp_path / "run.toml"
    path.write_text(MINIMAL.replace("[optimizer]\nlr = 1e-3\n", ""))
    with pytest.raises(ConfigError, match=re.escape("optimizer is missing; add a table [optimizer] with at least lr")):
        load_config(path)


def test_world_must_be_the_launchers_or_the_mesh_is_re_sized_where_it_may_be(file: Path) -> None:
    config = load_config(file)
    assert config.on_world(4) is config
    with pytest.raises(MeshError, match=r"mesh cluster=2 x node=2 has 4 ranks, but the launcher started 3 processes"):
        config.on_world(3)
    config = load_config(file, ["faults.resize=true"])
    assert config.on_world(4) is config
    assert config.on_world(6).mesh == {"cluster": 3, "node": 2}
    assert config.on_world(6).batch == config.batch


def test_auto_takes_the_cluster_in_the_sizes_of_the_mesh(file: Path) -> None:
    config = load_config(file, ["strategy=auto", "cluster=gloo-laptop", "mesh={ node = 3 }", "faults.resize=true"])
    assert config.hardware().axes == (("node", 3),)
    assert config.on_world(2).hardware().axes == (("node", 2),)


def test_documentation_names_every_key() -> None:
    page = Path(__file__).parents[3].joinpath("docs/training.md").read_text()
    assert [key for key in valid_keys(TrainConfig) if f"`{key}`" not in page] == []
    contract = """run.directory run.steps run.seed model.config data.files data.seq_len batch.global_sequences
        batch.micro optimizer.lr strategy mesh checkpoint.every checkpoint.keep checkpoint.resume"""
    assert set(contract.split()) <= set(valid_keys(TrainConfig))
