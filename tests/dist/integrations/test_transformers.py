"""transformers' Trainer with `sharding=` against itself without, in one process."""

from __future__ import annotations

import inspect
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import zeromesh as zm
from tests.dist.integrations.hugging import (
    BOUND,
    PUSHED,
    SAVED,
    STRATEGIES,
    arguments,
    assert_base_left_out,
    assert_same_curve,
    build,
    curve,
    launched,
    plain,
    samples,
    sharding,
)
from tests.dist.pool import Pool, on_ranks
from zeromesh.engine.param import ShardedParameter
from zeromesh.errors import CheckpointError, InputError, MeshError, ModelError, OptimizerError


def trained(
    directory: Path,
    kind: str = "llama",
    how: zm.Sharding | None = None,
    *,
    scale: float = 0,
    resume: str | None = None,
    **options: Any,
) -> Any:
    """A trainer that has run, and written its model."""
    import transformers as hf

    from zeromesh.integrations.transformers import Trainer

    own = {
        "args": arguments(directory, **options),
        "train_dataset": samples(),
        "eval_dataset": samples(16, seed=2, uneven=False),
    }
    stop = [hf.EarlyStoppingCallback(early_stopping_patience=2)] if "load_best_model_at_end" in options else []
    model = build(kind)
    kind_of = scaled(Trainer, scale) if scale else Trainer
    trainer = (
        hf.Trainer(model=model, callbacks=stop, **own)
        if how is None
        else kind_of(model=model, callbacks=stop, sharding=how, **own)
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def scaled(kind: Any, scale: float) -> Any:
    """With a scaler of gradients, which accelerate makes for devices alone."""

    class Scaled(kind):
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            self.accelerator.native_amp = True
            self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=4)

    return Scaled


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return {name: value for path in sorted(directory.glob("*.safetensors")) for name, value in load_file(path).items()}


def assert_same_weights(found: Path, expected: Path) -> None:
    left, right = weights(found), weights(expected)
    assert left.keys() == right.keys() and left
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=0, atol=2e-6)  # Adam's steps of 1e-2


def plainly(directory: Path, kind: str) -> tuple[Any, ...]:
    trainer = trained(directory, kind)
    trainer.save_model()
    found = trainer.predict(samples(6, seed=5))
    return (
        curve(trainer),
        trainer.evaluate()["eval_loss"],
        torch.from_numpy(found.predictions),
        trainer.state.total_flos,
    )


@pytest.mark.parametrize("kind", ["tied", "lora"])
@on_ranks(4)
def test_losses_are_those_of_plain_training(kind, tmp_path):
    expected, evaluated, predicted, flos = plain(lambda: plainly(tmp_path / "plain", kind))
    assert expected[-1][1] < expected[0][1]
    for strategy in PUSHED[kind]:
        directory = tmp_path / strategy
        with launched():
            trainer = trained(directory, kind, sharding(strategy))
            assert all(isinstance(param, ShardedParameter) for param in trainer.model.parameters())
            assert_same_curve(curve(trainer), expected)
            assert trainer.evaluate()["eval_loss"] == pytest.approx(evaluated, abs=BOUND)
            found = torch.from_numpy(trainer.predict(samples(6, seed=5)).predictions)
            torch.testing.assert_close(found, predicted, rtol=0, atol=1e-5)
            assert trainer.state.total_flos == flos
            trainer.save_model()
            zm.check_replicas(trainer.model, trainer.optimizer.optimizer)
        dist.barrier()
        assert_same_weights(directory, tmp_path / "plain")


EVERYTHING: dict[str, Any] = {
    "label_smoothing_factor": 0.1,
    "activation_checkpointing": True,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_strategy": "steps",
    "save_steps": 2,
    "save_total_limit": 2,
    "load_best_model_at_end": True,
    "metric_for_best_model": "eval_loss",
    "greater_is_better": False,
    "lr_scheduler_type": "constant",
    "learning_rate": 2e-2,
    "max_steps": 10,
}


def with_everything(directory: Path, how: zm.Sharding | None = None) -> tuple[Any, ...]:
    trainer = trained(directory, "llama", how, **EVERYTHING)
    evaluated = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
    best = trainer.evaluate()["eval_loss"]
    trainer.save_model()
    assert best == pytest.approx(min(evaluated), abs=BOUND)
    assert evaluated[-1] > min(evaluated) + 1e-3, evaluated
    left = sorted(path.name for path in directory.glob("checkpoint-*"))
    return curve(trainer), evaluated, Path(trainer.state.best_model_checkpoint).name, left


@on_ranks(2)
def test_smoothing_recomputation_evaluation_and_the_best_model(tmp_path):
    expected, *others = plain(lambda: with_everything(tmp_path / "plain"))
    with launched():
        found, *own = with_everything(tmp_path / "sharded", sharding("node=3", {"node": 2}))
    assert_same_curve(found, expected)
    torch.testing.assert_close(own[0], others[0], rtol=0, atol=BOUND)
    assert own[1:] == others[1:]
    dist.barrier()
    assert_same_weights(tmp_path / "sharded", tmp_path / "plain")


def stopped(directory: str, kind: str, strategy: str, mesh: dict[str, int]) -> None:
    with launched():
        trained(Path(directory), kind, sharding(strategy, mesh), save_strategy="steps", save_steps=SAVED)


def refused_on_another_base(directory: str, strategy: str, mesh: dict[str, int]) -> None:
    with pytest.raises(CheckpointError, match=r"beside other values of 1 of \d+ frozen .*q_proj.base_layer.weight"):
        resumed(directory, "lora", strategy, mesh, other_base=True)


def resumed(
    directory: str, kind: str, strategy: str, mesh: dict[str, int], *, other_base: bool = False, **options: Any
) -> Any:
    from zeromesh.integrations.transformers import Trainer

    with launched():
        args = arguments(directory, **options)
        trainer = Trainer(model=build(kind), args=args, train_dataset=samples(), sharding=sharding(strategy, mesh))
        with torch.no_grad():  # values that are not loaded show
            for parameter in trainer.model.parameters():
                parameter.zero_() if parameter.requires_grad else None
            if other_base:
                trainer.model.get_parameter("base_model.model.model.layers.1.self_attn.q_proj.base_layer.weight")[
                    7, 5
                ] += 1
        trainer.train(resume_from_checkpoint=f"{directory}/checkpoint-{SAVED}")
        return curve(trainer)


def test_resumes_on_another_world_and_strategy(pool: Pool, tmp_path):
    pool.run(4, stopped, str(tmp_path), "lora", STRATEGIES[0], {"cluster": 2, "node": 2})
    (expected,) = pool.run(1, alone, str(tmp_path / "plain"), "lora")
    assert_base_left_out(tmp_path / f"checkpoint-{SAVED}" / "zeromesh")  # the base is where it came from
    pool.run(2, refused_on_another_base, str(tmp_path), "node=1", {"node": 2})
    for found in pool.run(2, resumed, str(tmp_path), "lora", "node=1", {"node": 2}):
        assert_same_curve(found, expected)


def alone(directory: str, kind: str) -> Any:
    return plain(lambda: curve(trained(Path(directory), kind)))


@on_ranks(2)
def test_a_checkpoint_of_the_plain_trainer_is_gone_on_from(tmp_path):
    """With experts, which transformers 5.23 itself does not load from its own files."""
    expected = plain(lambda: curve(trained(tmp_path, "experts", save_strategy="steps", save_steps=SAVED)))
    found = resumed(str(tmp_path), "experts", "node=3", {"node": 2})
    assert_same_curve(found, expected)


@on_ranks(2)
def test_other_samples_a_step_are_refused_on_resuming(tmp_path):
    stopped(str(tmp_path), "llama", "node=3", {"node": 2})
    with pytest.raises(CheckpointError, match="was written with 8 samples a step, and this run takes 16"):
        resumed(str(tmp_path), "llama", "node=3", {"node": 2}, gradient_accumulation_steps=4)
    resumed(str(tmp_path), "llama", "node=3", {"node": 2}, gradient_accumulation_steps=4, ignore_data_skip=True)
    with pytest.raises(CheckpointError, match="was written with 8 samples a step, and this run takes 4"):
        resumed(str(tmp_path), "llama", "node=3", {"node": 2}, accelerator_config={"split_batches": True})


class Stream(torch.utils.data.IterableDataset[Any]):
    """A queue's samples, say: each process reads others."""

    def __iter__(self) -> Any:
        return iter(samples(seed=1 + dist.get_rank()))


@on_ranks(2)
def test_one_process_reads_a_stream_for_all(tmp_path):
    """As the plain Trainer's in DistributedDataParallel."""
    import transformers as hf

    from zeromesh.integrations.transformers import Trainer

    with launched():
        found = []
        for kind, how in ((hf.Trainer, {}), (Trainer, {"sharding": sharding("node=3", {"node": 2})})):
            trainer = kind(model=build(), args=arguments(tmp_path, max_steps=2), train_dataset=Stream(), **how)
            trainer.train()
            found.append(curve(trainer))
    assert_same_curve(*found)


@on_ranks(2)
def test_bf16_computes_and_sends_in_it_and_is_written_as_it_came(tmp_path):
    with launched():
        trainer = trained(tmp_path, "llama", sharding("node=3", {"node": 2}), bf16=True)
        from zeromesh.engine.api import engine_of

        specs = [buffer.spec for unit in engine_of(trainer.model).units for buffer in unit.buffers]
        assert {(spec.param_dtype, spec.master_dtype) for spec in specs} == {("bf16", "fp32")}
        trainer.save_model()
    expected = plain(lambda: curve(trained(tmp_path / "plain")))
    assert [loss for _, loss, _ in curve(trainer)] == pytest.approx([loss for _, loss, _ in expected], abs=0.02)
    dist.barrier()
    assert {value.dtype for value in weights(tmp_path).values()} == {torch.float32}


@on_ranks(2)
def test_means_over_each_rank_s_own_tokens(tmp_path):
    """As the plain Trainer's in DistributedDataParallel, of unequal numbers of tokens."""
    own: dict[str, Any] = {"average_tokens_across_devices": False, "max_steps": 2}
    with launched():
        expected = curve(trained(tmp_path / "plain", **own))
        found = curve(trained(tmp_path, "llama", sharding("node=3", {"node": 2}), **own))
        over_all = curve(trained(tmp_path / "other", "llama", sharding("node=3", {"node": 2}), max_steps=2))
    assert_same_curve(found, expected)
    assert any(one != pytest.approx(other, abs=1e-4) for one, other in zip(found, over_all, strict=True))


@on_ranks(2)
def test_fp16_with_a_scaler_of_gradients(tmp_path):
    expected = plain(lambda: curve(trained(tmp_path / "plain", max_steps=5)))
    options: dict[str, Any] = {"fp16": True, "max_steps": 5}
    with launched():
        found = curve(trained(tmp_path, "llama", sharding("node=3", {"node": 2}), scale=2.0**8, **options))
        overflows = trained(tmp_path, "llama", sharding("node=3", {"node": 2}), scale=2.0**20, **options)
        zm.check_replicas(overflows.model, overflows.optimizer.optimizer)
    for (_, loss, norm), (_, other, other_norm) in zip(found, expected, strict=True):
        assert loss == pytest.approx(other, abs=1e-2) and norm == pytest.approx(other_norm, abs=2e-2)
    assert {math.isfinite(norm) for _, _, norm in curve(overflows)} == {True, False}


def is_compiled(module):
    """The engine's own call is around the compiled one."""
    return inspect.getclosurevars(module._compiled_call_impl).nonlocals["compiled"] is not None


@on_ranks(2)
def test_blocks_are_compiled_by_themselves(tmp_path):
    expected = plain(lambda: curve(trained(tmp_path / "plain", max_steps=2)))
    with launched(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")  # torch's compiler looks there
        how = sharding("node=3", {"node": 2})
        trainer = trained(tmp_path, "llama", how, torch_compile_backend="aot_eager", max_steps=2)
        assert all(is_compiled(block) for block in trainer.model.model.layers)
        assert not is_compiled(trainer.model)
    assert_same_curve(curve(trainer), expected)


@pytest.mark.parametrize("strategy", ["node=3", "host=3,node=0"])
@on_ranks(2)
def test_ranks_generate_unequal_lengths(tmp_path, strategy):
    """Also where blocks come from the host, and each rank's by themselves; and they train afterwards."""
    from zeromesh.integrations.transformers import Trainer

    def generated(trainer: Any, which: int) -> list[int]:
        prompt = samples(8, seed=7)[which]["input_ids"][None]
        return trainer.model.generate(prompt, max_new_tokens=12, do_sample=False)[0].tolist()

    def ends(model: Any) -> Any:  # the second prompt's first token ends it
        model.generation_config.eos_token_id = first[1][10]
        return model

    first = plain(lambda: [generated(type("Plain", (), {"model": build()}), which) for which in (0, 1)])
    expected = plain(lambda: [generated(type("Plain", (), {"model": ends(build())}), which) for which in (0, 1)])
    assert len(expected[0]) > len(expected[1]) == 11
    with launched():
        trainer = Trainer(
            model=ends(build()),
            args=arguments(tmp_path),
            train_dataset=samples(),
            sharding=sharding(strategy, {"node": 2}),
        )
        trainer.shard_model()
        assert generated(trainer, dist.get_rank()) == expected[dist.get_rank()]
        trainer.train()


@on_ranks(1)
def test_adapters_are_saved_in_the_dtypes_of_plain_ones(tmp_path):
    import peft

    from zeromesh.integrations.pretrained import adapt

    def saved(sharded: bool) -> dict[str, torch.dtype]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            options = peft.LoraConfig(r=2, target_modules="all-linear", modules_to_save=["lm_head"])
            model = peft.get_peft_model(build().bfloat16(), options)
        if sharded:
            adapt(zm.shard(model, None, "node=3"), None)
        model.save_pretrained(tmp_path)
        return {name: value.dtype for name, value in load_file(tmp_path / "adapter_model.safetensors").items()}

    assert saved(True) == saved(False)


VIRTUAL: dict[str, Any] = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}
LAYERS: dict[str, Any] = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj"]}
BANK: dict[str, Any] = LAYERS | {"r": 2, "topk": 2, "num_vectors": 8, "vector_length": 4}
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "projected prefixes": ("PrefixTuningConfig", VIRTUAL | {"prefix_projection": True, "encoder_hidden_size": 6}),
    "shared buffers": ("VeraConfig", LAYERS | {"r": 2}),
    "weights that count most": ("VBLoRAConfig", BANK | {"save_only_topk_weights": True}),
    "frequencies": ("FourierFTConfig", LAYERS | {"n_frequency": 6}),
    "experts": ("LoraConfig", {"r": 2, "target_parameters": ["experts.gate_up_proj"], "init_lora_weights": False}),
    "magnitudes and a head": ("LoraConfig", LAYERS | {"r": 2, "use_dora": True, "modules_to_save": ["lm_head"]}),
}


@on_ranks(2)
def test_adapters_that_are_computed_or_buffered_are_saved(tmp_path):
    """As PEFT saves those of a plain model that has taken the same step, and loads them into a plain one."""
    import peft

    from zeromesh.integrations.methods import shard_model

    def stepped(kind: str, rows: slice, how: zm.Sharding | None) -> Any:
        name, options = ADAPTERS[kind]
        torch.manual_seed(5)
        model = peft.get_peft_model(build(kind), getattr(peft, name)(**options))
        if how is not None:
            shard_model(how, model)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
        model(input_ids=ids[rows], labels=ids[rows]).loss.backward()
        optimizer.step()
        return model

    def goes_on(model: Any) -> torch.Tensor:
        return model.eval().generate(input_ids=ids, do_sample=False, max_new_tokens=3)

    ids = torch.stack([each["input_ids"] for each in samples(4)])
    rank, how = dist.get_rank(), sharding("node=3", {"node": 2}).on("cpu")
    for kind in ADAPTERS:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT's, of names and of weights that may be saved
            model = stepped(kind, slice(2 * rank, 2 * rank + 2), how)
            said = goes_on(model)
            model.save_pretrained(tmp_path / f"ours{rank}")  # of the first rank, which has the tensors
            model.save_pretrained(tmp_path / f"given{rank}", state_dict=zm.full_state_dict(model))
            if rank == 0:
                plain = stepped(kind, slice(4), None)
                assert torch.equal(said, goes_on(plain))
                plain.save_pretrained(tmp_path / "plain")
                ours, theirs = weights(tmp_path / "ours0"), weights(tmp_path / "plain")
                torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
                loaded = peft.PeftModel.from_pretrained(build(kind), tmp_path / "ours0").eval()
                expected = peft.PeftModel.from_pretrained(build(kind), tmp_path / "plain").eval()
                torch.testing.assert_close(loaded(ids).logits, expected(ids).logits, rtol=0, atol=1e-6)
    with pytest.raises(ModelError, match="merge_and_unload needs whole weights, and each rank holds slices: save the"):
        model.merge_and_unload()
    dist.barrier()
    assert not (tmp_path / "ours1").exists() and not (tmp_path / "given1").exists()


def test_refuses(pool: Pool, tmp_path):
    pool.run(2, refuses, str(tmp_path))


def refuses(directory: str) -> None:
    from zeromesh.integrations.transformers import Trainer

    how = sharding("node=3", {"node": 2})

    def make(model: Any = None, *, sharding: Any = how, optimizers: Any = (None, None), **options: Any) -> Any:
        args = arguments(directory, **options)
        return Trainer(model or build(), args, train_dataset=samples(), sharding=sharding, optimizers=optimizers)

    with launched():
        with pytest.raises(InputError, match="fsdp cannot be used with sharding=: zeromesh shards the model itself"):
            make(fsdp=True)
        asking = arguments(directory)
        asking.deepspeed_plugin = object()  # as deepspeed=, or the file of `accelerate config`, leaves it
        with pytest.raises(InputError, match="deepspeed cannot be used with sharding=: zeromesh shards the model"):
            Trainer(build(), asking, train_dataset=samples(), sharding=how)
        with pytest.raises(InputError, match="bf16_full_eval cannot be used with sharding=: a sharded model cannot be"):
            make(bf16_full_eval=True)
        with pytest.raises(OptimizerError, match=r"optim=adafactor \(Adafactor\) is not known to: use adamw_torch"):
            make(optim="adafactor")
        model = build()
        with pytest.raises(OptimizerError, match=r"optimizers=.* holds an optimizer of the model as it is before"):
            make(model, optimizers=(torch.optim.AdamW(model.parameters()), None))
        with pytest.raises(
            MeshError, match=r"the job has 2 ranks and Sharding\(strategy='node=3'\) no mesh: .*'node': 2"
        ):
            make(sharding=zm.Sharding(strategy="node=3"))
