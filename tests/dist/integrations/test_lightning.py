"""Lightning's Trainer and Fabric with our strategies against themselves in one process without."""

from __future__ import annotations

import logging
import shutil
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

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
)
from tests.dist.pool import Pool, on_ranks
from zeromesh.errors import CheckpointError, InputError, ModelError, OptimizerError
from zeromesh.integrations.methods import is_sharded

CLIP = 0.2


@contextmanager
def started() -> Iterator[None]:
    """As `launched`, and where Lightning looks."""
    logging.getLogger("lightning").setLevel(logging.ERROR)
    with launched(), mock.patch.dict("os.environ", {"GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "test"}):
        yield


@contextmanager
def quiet() -> Iterator[None]:
    """Lightning advises on loaders' workers and on hooks that it does not use, warns of directories that a resumed run
    goes on in, and calls functions that torch deprecates."""
    from lightning.fabric.utilities.warnings import PossibleUserWarning

    with warnings.catch_warnings():
        for kind in (PossibleUserWarning, FutureWarning):
            warnings.simplefilter("ignore", kind)
        warnings.filterwarnings("ignore", "Checkpoint directory .* exists and is not empty", UserWarning)
        yield


def evaluated_by(trainer: Any, module: Any, world: int, **options: Any) -> float:
    with quiet():
        found: float = trainer.validate(module, loader(world), verbose=False, **options)[0]["evaluated"]
    return found


def loader(world: int, start: int = 0) -> Any:
    """Every world-th sample, unshuffled: those of a step are those of one process, in another order. From a sample on,
    since Lightning's Trainer, resumed within an epoch, begins with the first of its loader."""
    data = samples(uneven=False) * 4
    data = data[start:] + data[:start]
    rank = dist.get_rank() if world > 1 else 0
    sampler: Any = torch.utils.data.DistributedSampler(data, num_replicas=world, rank=rank, shuffle=False)
    return torch.utils.data.DataLoader(data, batch_size=SAMPLES // 2 // world, sampler=sampler)


def require_predicted(traffic: Any, steps: int) -> None:
    """So many bytes as a step of two micro-batches takes under the strategy, the first of them deferred as it says."""
    lines = traffic.lines(steps=steps)
    assert lines and [line.sent_bytes for line in lines] == [line.predicted_bytes for line in lines]


def norm_of(model: Any) -> float:
    return float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))


def make_module(kind: str, *, on_meta: bool = False) -> Any:
    import lightning

    class Module(lightning.LightningModule):
        """A user's; its model is made where it is to be sharded, its scale is its own and used beside the model."""

        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(()))
            self.net: Any = None
            self.curve: Curve = []
            self.losses: list[float] = []
            self.traffic: Any = None
            self.report = ExitStack()

        def configure_model(self) -> None:
            if self.net is None:
                with torch.device("meta" if on_meta else "cpu"):
                    self.net = build(kind)
                self.net.train()

        def on_train_start(self) -> None:
            if is_sharded(self):
                self.traffic = self.report.enter_context(zm.traffic_report(self, micro_batches=2))

        def on_train_end(self) -> None:
            self.report.close()

        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
            loss: torch.Tensor = self.net(**batch).loss * self.scale
            self.losses.append(float(self.all_gather(loss.detach()).mean()))
            self.log("loss", loss, sync_dist=True)
            return loss

        def validation_step(self, batch: dict[str, torch.Tensor], index: int) -> None:
            self.log("evaluated", self.net(**batch).loss, sync_dist=True)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.curve.append((self.global_step + 1, sum(self.losses) / 2, norm_of(self)))
            self.losses.clear()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW([param for param in self.parameters() if param.requires_grad], lr=1e-2)

    return Module()


def fitted(
    directory: Path,
    kind: str,
    how: zm.Sharding | None = None,
    *,
    steps: int = STEPS,
    resume: Any = None,
    **options: Any,
) -> tuple[Any, Any]:
    from zeromesh.integrations.lightning import Strategy

    world = 1 if how is None else dist.get_world_size()
    trainer = make_trainer(directory, None if how is None else Strategy(sharding=how), max_steps=steps, **options)
    module = make_module(kind)
    with quiet():
        trainer.fit(module, loader(world, SAVED * SAMPLES if resume else 0), ckpt_path=resume)
    return trainer, module


def make_trainer(directory: Path, strategy: Any = None, **options: Any) -> Any:
    import lightning

    own: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": CLIP, "enable_checkpointing": False}
    own["use_distributed_sampler"] = False
    return lightning.Trainer(
        strategy=strategy or "auto",
        accelerator="cpu",
        devices=dist.get_world_size() if strategy else 1,
        default_root_dir=directory,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,  # which warns of parameters on the meta device
        **own | options,
    )


@on_ranks(2)
def test_losses_are_those_of_plain_training(tmp_path):
    """Those of adapters, and on more ranks: where a run resumes, below."""

    def plainly() -> tuple[Curve, float]:
        trainer, module = fitted(tmp_path, "tied")
        return module.curve, evaluated_by(trainer, module, 1)

    expected, evaluated = plain(plainly)
    assert len(expected) == STEPS and max(norm for _, _, norm in expected) > CLIP
    with started():
        trainer, module = fitted(tmp_path, "tied", sharding("node=1", {"node": 2}))
        assert_same_curve(module.curve, expected)
        require_predicted(module.traffic, STEPS)
        assert evaluated_by(trainer, module, 2) == pytest.approx(evaluated, abs=1e-5)
        zm.check_replicas(module, trainer.optimizers[0])


@on_ranks(2)
def test_ranks_with_unequal_numbers_of_batches(tmp_path):
    """Three samples for the first rank and two for the second, since Lightning's sampler repeats none."""
    import lightning

    from zeromesh.integrations.lightning import Strategy

    class Twice(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False))
            torch.nn.init.constant_(self.net[0].weight, 2.0)

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.net(batch)
            return result

    def predicted(strategy: str, batch_size: int) -> list[float]:
        how = sharding(strategy, {"node": 2})
        trainer = make_trainer(tmp_path, Strategy(sharding=how), use_distributed_sampler=True)
        loader = torch.utils.data.DataLoader(torch.arange(5.0)[:, None], batch_size=batch_size)
        with quiet():
            return [float(each) for each in torch.cat(trainer.predict(Twice(), loader))]

    with started():
        own = [[0.0, 4.0, 8.0], [2.0, 6.0]][dist.get_rank()]
        assert predicted("node=1", 2) == predicted("node=3", 3) == own
        found = f"this one has {2 - dist.get_rank()} batches, and the ranks have 1 to 2: choose another batch_size"
        with pytest.raises(InputError, match=f"all ranks must run as many forwards.*; {found}"):
            predicted("node=3", 2)


def adversaries() -> Any:
    """A generator and a discriminator, which a step trains one after the other, each with its own optimizer."""
    import lightning
    from torch.nn import functional

    class Adversaries(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.automatic_optimization = False
            self.generator = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(2)), torch.nn.Linear(4, 6))
            self.discriminator = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
            self.losses: list[float] = []

        def judged(self, made: torch.Tensor, real: bool) -> torch.Tensor:
            found = self.discriminator(made)
            return functional.binary_cross_entropy_with_logits(found, torch.full_like(found, float(real)))

        def training_step(self, batch: torch.Tensor, index: int) -> None:
            first, second = self.optimizers()  # type: ignore[misc]  # two
            made = self.generator(batch[:, 6:])
            losses = [self.judged(batch[:, :6], True) + self.judged(made.detach(), False)]
            second.zero_grad()
            self.manual_backward(losses[0])
            second.step()
            losses.append(self.judged(self.generator(batch[:, 6:]), True))
            first.zero_grad()
            self.manual_backward(losses[1])
            first.step()
            self.losses += [float(self.all_gather(loss.detach()).mean()) for loss in losses]

        def configure_optimizers(self) -> Any:
            return [torch.optim.Adam(part.parameters(), 1e-2) for part in (self.generator, self.discriminator)]

    return Adversaries()


def played(directory: Path, how: zm.Sharding | None = None) -> tuple[list[float], dict[str, torch.Tensor]]:
    from zeromesh.integrations.lightning import Strategy

    world, rank = (1, 0) if how is None else (dist.get_world_size(), dist.get_rank())
    data = torch.randn(48, 10, generator=torch.Generator().manual_seed(1)).view(6, world, 8 // world, 10)
    own = data[:, rank].flatten(0, 1)
    options: dict[str, Any] = {"max_steps": 6, "accumulate_grad_batches": 1, "gradient_clip_val": None}
    trainer = make_trainer(directory, None if how is None else Strategy(sharding=how), **options)
    module = adversaries()
    with quiet():
        trainer.fit(module, torch.utils.data.DataLoader(own, batch_size=8 // world))
    return module.losses, module.state_dict() if how is None else zm.full_state_dict(module)


@on_ranks(4)
def test_two_optimizers_that_a_step_steps_itself(tmp_path):
    losses, weights = plain(lambda: played(tmp_path / "plain"))
    with started():
        found, own = played(tmp_path / "sharded", sharding())
    assert found == pytest.approx(losses, abs=1e-6) and len(found) == 6
    if dist.get_rank() == 0:
        torch.testing.assert_close(own, weights, rtol=0, atol=1e-6)


def test_resumes_on_another_world_and_strategy(pool: Pool, tmp_path):
    pool.run(4, stopped, str(tmp_path), "lora")
    assert_base_left_out(tmp_path / "whole.ckpt")
    for found, expected in pool.run(2, resumed, str(tmp_path), "lora"):
        assert_same_curve(found, expected)


def saving(directory: str, *callbacks: Any) -> dict[str, Any]:
    """Options of a Trainer that saves every second step."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    saver = ModelCheckpoint(f"{directory}/kept", filename="{step}", every_n_train_steps=2, save_last=True)
    return {"callbacks": [saver, *callbacks], "enable_checkpointing": True}


def averaging() -> Any:
    """A callback with a moving average of the trained parameters as its state."""
    from lightning.pytorch import Callback

    class Average(Callback):
        def on_fit_start(self, trainer: Any, module: Any) -> None:
            self.shadow = [param.detach().clone() for param in trained(module)]

        def on_before_zero_grad(self, trainer: Any, module: Any, optimizer: Any) -> None:
            with torch.no_grad():
                torch._foreach_lerp_(self.shadow, trained(module), 0.1)

        def state_dict(self) -> dict[str, Any]:
            return {"shadow": self.shadow}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.shadow = state["shadow"]

    return Average()


def trained(module: Any) -> list[torch.Tensor]:
    return [param for param in module.parameters() if param.requires_grad]


def require_kept(directory: str, step: int) -> None:
    """Each was saved several times: one written over, one in the place of another that is removed."""
    dist.barrier()
    assert {path.name for path in Path(directory, "kept").iterdir()} == {f"step={step}.ckpt", "last.ckpt"}
    assert len(list(Path(directory, "kept").glob("last.ckpt/*.pt"))) == 1


def stopped(directory: str, kind: str) -> None:
    with started():
        trainer, _ = fitted(Path(directory), kind, sharding(), steps=SAVED, **saving(directory, averaging()))
        require_kept(directory, SAVED)
        trainer.save_checkpoint(f"{directory}/whole.ckpt")
        trainer.save_checkpoint(f"{directory}/weights.ckpt", weights_only=True)


def resumed(directory: str, kind: str) -> tuple[Curve, Curve]:
    def plainly() -> tuple[Curve, list[torch.Tensor]]:
        wanted = averaging()
        return fitted(Path(directory), kind, callbacks=[wanted])[1].curve, wanted.shadow

    expected, shadow = plain(plainly)
    how = sharding("node=3", {"node": 2})
    with started():
        last, average = f"{directory}/kept/last.ckpt", averaging()
        trainer, module = fitted(Path(directory), kind, how, resume=last, **saving(directory, average))
        require_kept(directory, STEPS)
        assert all(a.allclose(b, rtol=0, atol=1e-6) for a, b in zip(average.shadow, shadow, strict=True))
        ended = evaluated_by(trainer, module, 2)
        whole, weights = (
            evaluated_by(trainer, module, 2, ckpt_path=f"{directory}/{name}.ckpt") for name in ("whole", "weights")
        )
        assert whole == weights != ended
        return module.curve, expected[SAVED:]


@on_ranks(2)
def test_resumes_from_a_file_of_another_strategy(tmp_path):
    def plainly() -> Curve:
        trainer, _ = fitted(tmp_path, "tied", steps=SAVED)
        trainer.save_checkpoint(tmp_path / "half.ckpt")
        return fitted(tmp_path, "tied", resume=tmp_path / "half.ckpt")[1].curve

    expected = plain(plainly)
    with started():
        found = fitted(tmp_path, "tied", sharding("node=3", {"node": 2}), resume=tmp_path / "half.ckpt")[1].curve
    assert_same_curve(found, expected)


class FabricLoop:
    """A user's script with Fabric; the optimizer is made of the plain model's parameters."""

    def __init__(self, kind: str = "tied", how: zm.Sharding | None = None, *, on_meta: bool = False) -> None:
        import lightning

        from zeromesh.integrations.lightning import FabricStrategy

        world = 1 if how is None else dist.get_world_size()
        strategy = "auto" if how is None else FabricStrategy(sharding=how)
        self.fabric = lightning.Fabric(accelerator="cpu", devices=world, strategy=strategy)
        self.fabric.launch()
        with self.fabric.init_module(empty_init=on_meta):
            model = build(kind)
        optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
        self.model, self.optimizer = self.fabric.setup(model, optimizer)
        self.loader = self.fabric.setup_dataloaders(loader(world), use_distributed_sampler=False)
        self.step = 0

    def run(self, steps: int) -> Curve:
        found = []
        batches = list(self.loader)
        self.model.train()
        while len(found) < steps:
            losses = []
            for last in (False, True):
                with self.fabric.no_backward_sync(self.model, enabled=not last):
                    loss = self.model(**batches[2 * self.step + last]).loss
                    self.fabric.backward(loss / 2)
                    losses.append(float(self.fabric.all_reduce(loss.detach())))
            norm = self.fabric.clip_gradients(self.model, self.optimizer, max_norm=CLIP)
            self.step += 1
            found.append((self.step, sum(losses) / 2, float(norm)))
            self.optimizer.step()
            self.optimizer.zero_grad()
        return found

    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "step": self.step}


@on_ranks(2)
def test_fabric_trains_and_resumes(tmp_path):
    """Under another strategy; `test_resumes_on_another_world_and_strategy` has fewer ranks."""
    lora = plain(lambda: FabricLoop("lora").run(SAVED))
    expected = plain(lambda: FabricLoop().run(STEPS))
    with started():
        assert_same_curve(FabricLoop("lora", sharding("node=1", {"node": 2})).run(SAVED), lora)
        loop = FabricLoop("tied", sharding("node=1", {"node": 2}))
        loop.fabric.save(f"{tmp_path}/tied", loop.state())  # written over
        assert_same_curve(loop.run(SAVED), expected[:SAVED])
        loop.fabric.save(f"{tmp_path}/tied", loop.state())
        with zm.traffic_report(loop.model.module, micro_batches=2) as traffic:
            assert_same_curve(loop.run(STEPS - SAVED), expected[SAVED:])
        require_predicted(traffic, STEPS - SAVED)
    resumes_with_fabric(str(tmp_path), expected)


@on_ranks(2)
def test_steps_of_a_lightning_module_are_forwards_with_fabric():
    """They compute with parameters of the module itself, as under DDP."""
    import lightning

    from zeromesh.integrations.lightning import FabricStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = torch.nn.Linear(4, 4)
            self.bias = torch.nn.Parameter(torch.ones(4))

        def training_step(self, rows: torch.Tensor, index: int) -> torch.Tensor:
            return (self.net(rows) + self.bias).square().mean()

    rows, plainly = torch.randn(3, 4, generator=torch.Generator().manual_seed(1)), Module()
    plainly.training_step(rows, 0).backward()
    with started():
        strategy = FabricStrategy(sharding=sharding("node=3", {"node": 2}))
        fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy=strategy)
        fabric.launch()
        model = fabric.setup(Module())
        fabric.backward(model.training_step(rows, 0))
    for ours, theirs in zip(model.parameters(), plainly.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.sum(), theirs.grad.sum())


def resumes_with_fabric(directory: str, expected: Curve) -> None:
    from zeromesh.integrations.lightning import FabricStrategy, Strategy

    half = f"{directory}/tied"
    with started():
        loop = FabricLoop("tied", sharding("node=3", {"node": 2}), on_meta=True)
        loop.run(1)  # its states are replaced
        state = loop.state()
        assert loop.fabric.load(half, state) == {}
        loop.step = state["step"]
        assert_same_curve(loop.run(STEPS - SAVED), expected[SAVED:])

        with pytest.raises(InputError, match="to load a checkpoint of sharded models give the dict of what was saved"):
            loop.fabric.load(half, {"step": 0})
        with pytest.raises(KeyError, match="has no epoch: leave it out, or pass strict=False"):
            loop.fabric.load(half, {"model": loop.model, "epoch": 0})
        with pytest.raises(InputError, match="an optimizer is saved and loaded with the model that it updates"):
            loop.fabric.save(f"{directory}/no", {"model": other(loop.fabric), "optimizer": loop.optimizer})
        full = zm.full_state_dict(loop.model.module)
        loop.fabric.save(f"{directory}/named.pt", {"net": loop.model.state_dict(), "step": 20})  # files, as elsewhere
        loop.fabric.save(f"{directory}/raw.pt", loop.model.state_dict())
        saved = loop.fabric.load(f"{directory}/named.pt")
        assert saved["step"] == 20 and all(torch.equal(value, saved["net"][name]) for name, value in full.items())
        with torch.no_grad():
            for param in loop.model.parameters():
                param.zero_()
        loop.fabric.load_raw(f"{directory}/raw.pt", loop.model)
        again = zm.full_state_dict(loop.model.module)
        assert all(torch.equal(value, again[name]) for name, value in full.items())

        average = [param.detach().clone() for param in loop.model.parameters()]
        loop.fabric.save(f"{directory}/averaged", loop.state() | {"average": average})
        found = loop.state() | {"average": [torch.zeros_like(each) for each in average]}
        loop.fabric.load(f"{directory}/averaged", found)
        assert all(map(torch.equal, found["average"], average))
        with pytest.raises(InputError, match="give the same values on every rank, not only on the first"):
            loop.fabric.save(f"{directory}/no", loop.state() | {"average": average[dist.get_rank() :]})

        with pytest.raises(InputError, match="take no storage_options and no filter"):
            loop.fabric.save(f"{directory}/no", loop.state(), filter={"model": lambda name, value: True})
        with pytest.raises(InputError, match="go to a directory that all ranks see; got s3://bucket/ten"):
            loop.fabric.save("s3://bucket/ten", loop.state())
        with pytest.raises(ModelError, match="the model is sharded already: give a plain one"):
            loop.fabric.setup(zm.Sharding(strategy="node=3", mesh={"node": 2}).shard(build()))

        with pytest.raises(InputError, match=r"sharding= takes zm.Sharding\(strategy=.*; got {'node': 3}"):
            FabricStrategy(sharding={"node": 3})
        mixing = make_module("llama")
        mixing.configure_optimizers = lambda: torch.optim.Adafactor(mixing.parameters())
        with quiet(), pytest.raises(OptimizerError, match=r"must work element by element; .*Adafactor is not known to"):
            make_trainer(Path(directory), Strategy(sharding=sharding("node=3", {"node": 2}))).fit(mixing, loader(2))

        # Killed where the first of two models was written anew.
        both = {"model": loop.model, "other": other(loop.fabric)}
        loop.fabric.save(f"{directory}/both", both)
        loop.fabric.save(f"{directory}/new", {"model": loop.model})
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(f"{directory}/both/model")
            shutil.copytree(f"{directory}/new/model", f"{directory}/both/model")
        dist.barrier()
        with pytest.raises(CheckpointError, match="a save over an older one was interrupted"):
            loop.fabric.load(f"{directory}/both", both)


def other(fabric: Any) -> Any:
    return fabric.setup(torch.nn.Linear(2, 2))


@on_ranks(2)
def test_a_model_on_the_meta_device_computes_in_the_trainers_precision(tmp_path):
    from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging

    from zeromesh.engine.api import engine_of
    from zeromesh.integrations.lightning import FabricStrategy, Strategy

    how = sharding("node=3", {"node": 2})
    with started():
        trainer = make_trainer(tmp_path, Strategy(sharding=how), precision="bf16-mixed", max_steps=2)
        module = make_module("llama", on_meta=True)
        with quiet():
            trainer.fit(module, loader(2))
        specs = {buffer.spec.param_dtype for unit in engine_of(module).units for buffer in unit.buffers}
        assert specs == {"bf16"}
        assert all(2.5 < loss < 4 for _, loss, _ in module.curve)  # of 23 tokens: 3.1

        with pytest.raises(InputError, match="take no storage_options: leave them out"):
            trainer.save_checkpoint(tmp_path / "no", storage_options={})
        with pytest.raises(ModelError, match="the model is sharded already: give a plain one"), quiet():
            make_trainer(tmp_path, Strategy(sharding=how)).fit(module, loader(2))
        with pytest.raises(InputError, match="sync_batchnorm=True cannot be used with sharding="), quiet():
            make_trainer(tmp_path, Strategy(sharding=how), sync_batchnorm=True).fit(make_module("llama"), loader(2))
        warnings.filterwarnings("ignore", "You're using the WeightAveraging callback with a model that overrides")
        for callback in (EMAWeightAveraging(), StochasticWeightAveraging(0.1)):
            with pytest.raises(InputError, match=rf"{type(callback).__name__} copies the module before"), quiet():
                make_trainer(tmp_path, Strategy(sharding=how), callbacks=[callback]).fit(
                    make_module("llama"), loader(2)
                )
        for kind in (Strategy, FabricStrategy):
            with pytest.raises(InputError, match="static_graph cannot be used with sharding=: of the options of"):
                kind(sharding=how, static_graph=True)
