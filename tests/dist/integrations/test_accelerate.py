"""accelerate's Accelerator with `sharding=` against itself without, in one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeromesh as zm
from tests.dist.integrations.hugging import (
    SAMPLES,
    SAVED,
    STEPS,
    Curve,
    assert_base_left_out,
    assert_same_curve,
    build,
    launched,
    plain,
    samples,
    sharding,
    surroundings,
)
from tests.dist.pool import Pool, on_ranks
from zeromesh.errors import InputError, MeshError, ModelError, OptimizerError

CLIP = 0.2


class Loop:
    """A user's script: accumulation over two micro-batches, clipping, AdamW; `run` goes on at a step."""

    def __init__(self, kind: str = "llama", how: zm.Sharding | None = None, **options: Any) -> None:
        import accelerate

        from zeromesh.integrations.accelerate import Accelerator

        options = {"gradient_accumulation_steps": 2} | options
        make = options.pop("optimizer", torch.optim.AdamW)
        self.accelerator = accelerate.Accelerator(**options) if how is None else Accelerator(sharding=how, **options)
        model = build(kind)
        optimizer = make([param for param in model.parameters() if param.requires_grad], lr=1e-2)
        loader = torch.utils.data.DataLoader(
            samples(uneven=False) * 4, batch_size=SAMPLES // 2 // self.accelerator.num_processes
        )
        # The optimizer first: the order is the user's.
        self.optimizer, self.model, self.loader = self.accelerator.prepare(optimizer, model, loader)

    def run(self, steps: int, start: int = 0) -> Curve:
        found, loss_sum = [], 0.0
        loader = self.accelerator.skip_first_batches(self.loader, 2 * start)
        self.model.train()
        for batch in loader:
            with self.accelerator.accumulate(self.model):
                loss = self.model(**batch).loss
                self.accelerator.backward(loss)
                loss_sum += self.accelerator.reduce(loss.detach(), "mean").item() / 2
                if self.accelerator.sync_gradients:
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), CLIP)
                    found.append((start + len(found) + 1, loss_sum, float(norm)))
                    loss_sum = 0.0
                self.optimizer.step()
                self.optimizer.zero_grad()
            if len(found) == steps:
                return found
        raise AssertionError("too few samples")


@on_ranks(2)
def test_losses_are_those_of_plain_training(tmp_path):
    """Those of adapters, and on more ranks: where a run resumes, below."""

    def plainly() -> tuple[Curve, dict[str, torch.Tensor]]:
        loop = Loop("tied")
        return loop.run(STEPS), loop.model.state_dict()

    expected, state = plain(plainly)
    assert max(norm for _, _, norm in expected) > CLIP
    with launched():
        loop = Loop("tied", sharding("node=1", {"node": 2}))
        with zm.traffic_report(loop.model, micro_batches=2) as traffic:
            assert_same_curve(loop.run(STEPS), expected)
        lines = traffic.lines(steps=STEPS)
        assert [line.sent_bytes for line in lines] == [line.predicted_bytes for line in lines]
        found = loop.accelerator.get_state_dict(loop.model)
        assert loop.accelerator.unwrap_model(loop.model) is loop.model
        assert found.keys() == (state.keys() if dist.get_rank() == 0 else set())
        for name, value in found.items():
            torch.testing.assert_close(value, state[name], rtol=0, atol=2e-6)


@on_ranks(2)
def test_an_optimizer_whose_states_its_constructor_makes():
    options = {"optimizer": functools.partial(torch.optim.Adagrad, initial_accumulator_value=0.1)}
    expected = plain(lambda: Loop("lora", **options).run(2))
    with launched():
        for strategy in ("node=3", "host=1,node=1"):
            assert_same_curve(Loop("lora", sharding(strategy, {"node": 2}), **options).run(2), expected)


class Average:
    """A moving average as diffusers and many scripts keep it."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = [param.detach().clone() for param in model.parameters()]

    @torch.no_grad()
    def step(self, model: nn.Module) -> None:
        for average, param in zip(self.shadow, model.parameters(), strict=True):
            average.sub_(0.1 * (average - param))

    @torch.no_grad()
    def copy_to(self, model: nn.Module) -> None:
        for average, param in zip(self.shadow, model.parameters(), strict=True):
            param.data.copy_(average.data)

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = [each.clone() for each in state["shadow"]]


def averaged(loop: Loop, average: Average, start: int, stop: int) -> Curve:
    found = []
    for step in range(start, stop):
        found += loop.run(1, start=step)
        average.step(loop.model)
    return found


def test_states_and_a_registered_average_resume_on_another_world_and_strategy(pool: Pool, tmp_path):
    pool.run(4, stopped, str(tmp_path))
    assert_base_left_out(tmp_path / "zeromesh_0")
    pool.run(2, resumed, str(tmp_path))


def stopped(directory: str) -> None:
    with launched():
        loop = Loop("lora", sharding())
        average = Average(loop.model)
        loop.accelerator.register_for_checkpointing(average)
        averaged(loop, average, 0, SAVED)
        loop.accelerator.save_state(directory)


def resumed(directory: str) -> None:
    def expected() -> tuple[Curve, dict[str, Any]]:
        loop = Loop("lora")
        average = Average(loop.model)
        found = averaged(loop, average, 0, STEPS)
        average.copy_to(loop.model)
        return found, {name: value.clone() for name, value in loop.model.state_dict().items()}

    expected_curve, wanted = plain(expected)
    with launched():
        loop = Loop("lora", sharding("node=3", {"node": 2}))
        loop.run(1)  # its states are replaced
        average = Average(loop.model)
        loop.accelerator.register_for_checkpointing(average)
        loop.accelerator.load_state(directory)
        assert loop.accelerator.step == 2 * SAVED
        assert_same_curve(averaged(loop, average, SAVED, STEPS), expected_curve[SAVED:])
        average.copy_to(loop.model)
        for name, value in zm.full_state_dict(loop.model).items():
            torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_metrics_and_models_are_written(tmp_path):
    import transformers as hf

    with launched():
        loop = Loop("tied", sharding("node=3", {"node": 2}))
        odd = loop.accelerator.prepare(torch.utils.data.DataLoader(list(range(11)), batch_size=2))
        assert torch.cat([loop.accelerator.gather_for_metrics(batch) for batch in odd]).tolist() == list(range(11))
        loop.accelerator.save_model(loop.model, tmp_path / "model")
        loop.model.save_pretrained(tmp_path / "pretrained", is_main_process=loop.accelerator.is_main_process)
        # By all ranks, of which the first has the tensors.
        loop.model.save_pretrained(tmp_path / f"given{dist.get_rank()}", state_dict=zm.full_state_dict(loop.model))
        dist.barrier()
    assert not (tmp_path / "given1").exists()
    for which in ("model", "pretrained", "given0"):
        loaded = hf.LlamaForCausalLM.from_pretrained(tmp_path / which)
        for name, value in build("tied").state_dict().items():
            assert torch.equal(loaded.state_dict()[name], value)


def test_refuses(pool: Pool, tmp_path):
    pool.run(2, refuses)


def refuses() -> None:
    import accelerate
    from accelerate.utils import DataLoaderConfiguration

    from zeromesh.integrations.accelerate import Accelerator

    how = sharding("node=3", {"node": 2})
    with (  # as torchrun starts it where there is no GPU, and nobody says cpu=True
        surroundings(dist.get_rank(), 1),
        pytest.raises(InputError, match=r"the job has 2 ranks, and accelerate splits data among 1: .*cpu=True"),
    ):
        Accelerator(sharding=how)
    wide, uneven = sharding("node=3", {"node": 4}), DataLoaderConfiguration(even_batches=False)
    plugin = accelerate.FullyShardedDataParallelPlugin()
    for options, error, message in (
        ({"sharding": "node=3"}, InputError, r"sharding= takes zm.Sharding\(strategy=.*; got 'node=3'"),
        ({"sharding": wide}, MeshError, r"the mesh \(node=4\) has 4 ranks and the job 2"),
        ({"dynamo_backend": "eager"}, InputError, "dynamo_backend cannot be used with sharding=: compile the model's"),
        ({"dataloader_config": uneven}, InputError, "even_batches=False cannot be used with sharding=: all ranks must"),
        ({"fsdp_plugin": plugin}, InputError, "fsdp_plugin cannot be used with sharding=: zeromesh shards the model"),
    ):
        with launched(), pytest.raises(error, match=message):
            Accelerator(**({"sharding": how} | options))
    with launched():
        accelerator = Accelerator(sharding=how)
        model = nn.Linear(2, 2)
        mixing = torch.optim.LBFGS(model.parameters())
        with pytest.raises(
            OptimizerError, match=r"must work element by element; torch.optim.lbfgs.LBFGS is not known to"
        ):
            accelerator.prepare(model, mixing)
        with pytest.raises(ModelError, match="the model is in torch's DistributedDataParallel already, which would go"):
            accelerator.prepare(nn.parallel.DistributedDataParallel(nn.Linear(2, 2)))
        with pytest.raises(ModelError, match="the model is sharded already: give a plain one"):
            accelerator.prepare(zm.Sharding(strategy="node=3", mesh={"node": 2}).shard(nn.Linear(2, 2)))
        model = nn.Linear(2, 2)
        stepped = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 2)).sum().backward()
        stepped.step()
        with pytest.raises(OptimizerError, match="AdamW has stepped on the model before it was sharded, so its states"):
            accelerator.prepare(model, stepped)
