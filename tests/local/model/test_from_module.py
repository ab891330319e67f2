"""Reading a module agrees with reading its config.json: parameters and FLOPs exactly, activation bytes closely."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.architectures import planned_flops, real_flops
from zeromesh.errors import ModelError
from zeromesh.model.from_module import from_factory, from_module
from zeromesh.model.huggingface import from_config
from zeromesh.model.load import load_model
from zeromesh.model.module_values import KnownValues
from zeromesh.model.presets import preset_shape
from zeromesh.model.shape import TransformerShape
from zeromesh.model.spec import Recomputation, UnitKind
from zeromesh.model.transformer import build

transformers = pytest.importorskip("transformers")

SEQ_LEN = 256
_LLAMA: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 3, "vocab_size": 1000}
_LLAMA |= {"num_attention_heads": 8, "num_key_value_heads": 4}
_GPT2: dict[str, Any] = {"n_embd": 256, "n_layer": 3, "n_head": 8, "vocab_size": 1000, "n_positions": 512}
_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def configs() -> dict[str, Any]:
    return {
        "llama": transformers.LlamaConfig(**_LLAMA),
        "llama tied": transformers.LlamaConfig(**_LLAMA, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
        "qwen2": transformers.Qwen2Config(**_LLAMA),
        "gpt2": transformers.GPT2Config(**_GPT2, **_NO_DROPOUT, bos_token_id=0, eos_token_id=0),
        "gpt2 dropout": transformers.GPT2Config(**_GPT2, bos_token_id=0, eos_token_id=0),
        "mpt": transformers.MptConfig(d_model=256, n_heads=8, n_layers=3, vocab_size=1000),
        "mixtral": transformers.MixtralConfig(**_LLAMA, num_local_experts=4, num_experts_per_tok=2),
    }


def shapes() -> dict[str, TransformerShape]:
    """Sizes of the families that only presets have."""
    sizes = {"hidden": 256, "layers": 3, "heads": 8, "ffn": 1024, "vocab": 1000}
    gpt2 = replace(preset_shape("gpt2"), **sizes, head_dim=0, kv_heads=0, max_positions=512)
    mpt = replace(preset_shape("mpt-7b"), **sizes, head_dim=0, kv_heads=0, max_positions=0, fused_attention=False)
    no_biases = dict.fromkeys(("norm_bias", "qkv_bias", "output_bias", "mlp_bias"), False)
    return {"gpt2": replace(gpt2, dropouts_per_block=0), "gpt2 dropout": gpt2, "mpt": replace(mpt, **no_biases)}


# Relative, of the bytes that all units save. Left over: rotary and ALiBi tables, the loss's scalar, and for the
# routed experts the router's small tensors. torch's CPU dropout keeps its mask in the compute dtype, an accelerator's
# in one byte, as the config's reader has it.
TOLERANCE = {"gpt2 dropout": 0.05, "mixtral": 0.01}


def described(name: str) -> nn.Module:
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(configs()[name])  # type: ignore[no-any-return]


def described_by(units: Any) -> list[Any]:
    tensors = [{(t.name, t.shape, t.lookup, t.active_share) for t in unit.tensors} for unit in units]
    return [(u.name, u.kind, u.count, u.forward_flops(SEQ_LEN), of) for u, of in zip(units, tensors, strict=True)]


@pytest.mark.parametrize("name", [name for name in configs() if name != "llama"])
def test_module_and_config_agree(name: str) -> None:
    """The peak is where the loss's two fp32 gradients meet all saved tensors, or in the first block's backward."""
    config = build(shapes()[name]) if name in shapes() else from_config(configs()[name].to_dict(), name=name)
    module = from_module(described(name), seq_len=SEQ_LEN)
    assert described_by(config.units) == described_by(module.units)
    assert config.model_flops_per_token(SEQ_LEN) == module.model_flops_per_token(SEQ_LEN)
    tolerance = TOLERANCE.get(name, 2e-3)
    for kind in Recomputation:
        expected = config.saved_activation_bytes(SEQ_LEN, kind)
        assert module.saved_activation_bytes(SEQ_LEN, kind) == pytest.approx(expected, rel=tolerance)
        if name in ("llama tied", "gpt2") and kind is not Recomputation.SELECTIVE:
            peak = config.peak_activation_bytes(SEQ_LEN, kind)
            assert module.peak_activation_bytes(SEQ_LEN, kind) == pytest.approx(peak, rel=0.02)
    if name == "llama tied":
        blocks = [next(u for u in model.units if u.kind is UnitKind.BLOCK) for model in (config, module)]
        working = [block.activations.working.at(SEQ_LEN) for block in blocks]
        assert working[0] == pytest.approx(working[1], rel=1e-3)


def test_reading_leaves_the_module_alone() -> None:
    module = transformers.AutoModelForCausalLM.from_config(configs()["llama"])
    before = {name: (parameter, parameter.sum().item()) for name, parameter in module.named_parameters()}
    from_module(module, seq_len=64)
    after = dict(module.named_parameters())
    for name, (parameter, total) in before.items():
        assert after[name] is parameter and parameter.sum().item() == total
    assert all(parameter.grad is None for parameter in after.values())
    assert not any(part._forward_hooks for part in module.modules())


class Blocks(nn.Module):
    """An embedding, convolutional blocks of its own and a head: nothing that transformers knows."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 32)
        self.layers = nn.ModuleList(nn.Conv1d(32, 32, 3, padding=1) for _ in range(4))
        self.head = nn.Linear(32, 100)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids).transpose(1, 2)
        for layer in self.layers:
            hidden = hidden + layer(hidden).relu()
        return self.head(hidden.transpose(1, 2))  # type: ignore[no-any-return]


def test_any_module_is_cut_and_counted() -> None:
    model = from_module(Blocks(), seq_len=97, dtype="fp32")
    assert [(unit.name, unit.kind, unit.count) for unit in model.units] == [
        ("embedding", UnitKind.EMBEDDING, 1),
        ("layers.0", UnitKind.BLOCK, 4),
        ("head", UnitKind.HEAD, 1),
    ]
    assert model.num_params == sum(parameter.numel() for parameter in Blocks().parameters())
    module = Blocks()
    module.layers.requires_grad_(False)
    frozen = from_module(module, seq_len=97)
    assert frozen.num_params - frozen.num_trainable == sum(p.numel() for p in module.layers.parameters())
    convolution, head = 2 * 3 * 32 * 32, 2 * 32 * 100
    assert [unit.forward_flops(97) for unit in model.units] == pytest.approx([0, convolution, head])
    # A backward counts the part that runs.
    module, seq_len = Partly(), 31
    found = from_module(module, seq_len=seq_len, dtype="fp32")
    assert planned_flops(found, seq_len) == pytest.approx(real_flops(module, seq_len), rel=1e-6)
    blocks = (unit for unit in found.units if unit.kind is UnitKind.BLOCK)
    shares = [[product.returned for product in block.matmuls] for block in blocks]
    assert shares == [[0.0, 0.5], [0.0, 1.0]]  # the first has inputs with gradients that were made without


class Mirrored(torch.autograd.Function):
    """A product whose backward computes one gradient where autograd would compute two."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x @ x.transpose(1, 2) @ x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * (x @ x.transpose(1, 2)) @ gradient  # type: ignore[no-any-return]


class Partly(nn.Module):
    """Its backward is not twice its forward: it runs without gradients first, chooses by a layer that learns nothing,
    feeds one an input that needs none, and has a backward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.places, self.chooses = nn.Linear(16, 16), nn.Linear(16, 4)
        self.head = nn.Linear(16, 50)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for enabled in (False, True):
            with torch.set_grad_enabled(enabled):
                for block in self.blocks:
                    x = block(x).relu() if enabled else block(x)
        chosen = self.chooses(x).argmax(-1, keepdim=True)
        x = x + self.places(torch.ones(ids.shape[1], 16)) * chosen
        return self.head(Mirrored.apply(x))  # type: ignore[no-any-return, no-untyped-call]


class Choosy(nn.Module):
    """Runs on eights of tokens alone; a layer casts itself, two dtypes meet, and its weights decide a yes or no."""

    def __init__(self, every: int = 8) -> None:
        super().__init__()
        self.every = every
        self.embedding = nn.Embedding(100, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 100)

    def forward(self, ids: Tensor) -> Tensor:
        if ids.shape[1] % self.every:
            raise ValueError(f"length {ids.shape[1]} has to be a multiple of {self.every}")
        given = self.embedding(ids)
        first, second, third = self.blocks
        x = first.float()(given.float())
        assert not torch.isnan(x).sum()
        x = second(x @ given.transpose(1, 2) @ given)  # fp32 meets bf16
        if x.max() > 3:
            x = third(x)
        return self.head(x)  # type: ignore[no-any-return]


def test_a_module_that_is_choosy_is_read_and_what_was_assumed_is_said() -> None:
    model = from_module(Choosy(), seq_len=32)
    assert [sum(product.forward_flops for product in unit.matmuls) for unit in model.units] == [0, 512, 0, 3200]
    assert model.num_params == sum(parameter.numel() for parameter in Choosy().parameters())
    decided, cast = sorted(model.assumed, key=len)
    assert "matmul takes no bf16 and fp32, and is computed in bf16, as under autocast" in cast
    assert "test_from_module.py" in decided
    assert "(if x.max() > 3:) is taken to be no" in decided
    assert from_module(Blocks(), seq_len=32).assumed == ()
    assert from_module(Choosy(every=32), seq_len=32).num_params == model.num_params  # half of it would not do
    with pytest.raises(ModelError, match=r"length 33 has to be a multiple of 8.*Give package\.module:function"):
        from_module(Choosy(), seq_len=33)


def test_what_takes_too_many_operations_is_read_from_a_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choices, of fewer tokens than there is to choose from, are spread over all of it."""
    whole = from_module(Blocks(), seq_len=97, dtype="fp32")
    lengths: list[int] = []
    original = Blocks.forward

    def forward(self: Blocks, ids: Tensor) -> Tensor:
        lengths.append(ids.shape[1])
        assert torch.randn(ids.shape[1], 100).topk(1).indices.max() >= 50
        return original(self, ids)

    monkeypatch.setattr(Blocks, "forward", forward)
    monkeypatch.setattr("zeromesh.model.from_module.ALL_OPERATIONS", 10)
    few = from_module(Blocks(), seq_len=97, dtype="fp32")
    assert lengths == [97, 97, 61, 17, 3, 2]
    assert planned_flops(few, 97) == pytest.approx(planned_flops(whole, 97))


class Lengths(nn.Module):
    """Cuts its sequence by numbers, which come with its inputs, else from its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        x = self.layer(x)
        if lengths is None:
            lengths = x.sum(-1).long().flatten()
        return torch.stack([part.sum() for part in x.split(lengths.tolist(), 1)])


def make_lengths() -> tuple[nn.Module, dict[str, Tensor]]:
    return Lengths(), {"x": torch.zeros(1, 32, 8), "lengths": torch.full((4,), 8)}


def make_no_lengths() -> tuple[nn.Module, dict[str, Tensor]]:
    return Lengths(), {"x": torch.zeros(1, 32, 8)}


def test_numbers_are_those_of_the_inputs_and_none_of_weights() -> None:
    model = from_factory(f"{__name__}:make_lengths", seq_len=32)
    assert model.units[0].forward_flops(32) == 2 * 8 * 8
    words = r"Lengths asks for numbers that its weights compute, .*_module.py:\d+ \(return torch.stack.*Give"
    with pytest.raises(ModelError, match=words):
        from_factory(f"{__name__}:make_no_lengths", seq_len=32)


MADE: dict[str, Any] = {
    "with_inputs": (nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), (torch.zeros(1, 31, 8),)),
    "number": 3,
    "three": (nn.Linear(8, 8), torch.zeros(1, 64, 8), 64),
    "others": (nn.Linear(8, 8), {"scale": 2.0}),
    "wrong_shape": nn.Linear(8, 8),
    "blocks": Blocks(),
}


def __getattr__(name: str) -> Any:
    """The factories make_..."""
    if name.removeprefix("make_") not in MADE:
        raise AttributeError(f"module has no attribute {name!r}")
    return lambda: MADE[name.removeprefix("make_")]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("make_nothing", "has no attribute 'make_nothing'"),
        ("make_number", r"must return an nn\.Module or \(module, inputs\), got int"),
        ("make_three", r"must return an nn\.Module or \(module, inputs\), got a tuple of 3"),
        ("make_with_inputs", r"must be of shape \(1, 64, \.\.\.\), .* --seq-len, .*; got \(1, 31, 8\)"),
        ("make_others", r"must be of shape \(1, 64, \.\.\.\), .*; got no tensor"),
        ("make_wrong_shape", r"Linear does not run on fake tensors .* returns \(module, inputs\)"),
    ],
)
def test_factories_are_called_and_wrong_ones_say_what_is_wrong(function: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        from_factory(f"{__name__}:{function}", seq_len=64)
    assert load_model(f"{__name__}:make_blocks", seq_len=97).units[1].count == 4
    units = from_factory(f"{__name__}:make_with_inputs", seq_len=31).units
    assert sum(unit.count * unit.forward_flops(31) for unit in units) == 2 * 2 * 8 * 8
    module = nn.Linear(4, 4)
    module.last = module.weight * 2
    with pytest.raises(ModelError, match=r"Linear cannot be copied without .*give a module that has not run"):
        from_module(module, seq_len=31)


# ---- Values beside fake tensors: known ones are right, and others are not guessed


class Beside(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.values = KnownValues()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.values.run(func, args, kwargs or {})


def test_values_that_are_known() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        weight = torch.empty(7, 5)
        with Beside() as beside:
            mask = torch.arange(7) > 3
            assert mask.sum().item() == 3 and mask.nonzero().shape == (3, 1)
            assert weight[mask].shape == (3, 5)  # of known places, values that are not
            part = mask[:5]
            mask.fill_(True)
            assert part.all().item()  # a view sees it
            with pytest.raises(DataDependentOutputException):
                weight.argmin().item()
            assert not beside.values.assumed
            mask.copy_(weight[:, 0] > 0)
            assert not part.all().item()  # written to, with unknown values: a yes or no is a no, and noted
            assert len(beside.values.assumed) == 1

    # Choices spread evenly and chances are means.
    def rows(chosen: Tensor) -> list[Any]:
        return list(chosen.tolist())

    with FakeTensorMode(allow_non_fake_inputs=True):
        scores = torch.empty(3, 4)
        with Beside():
            assert rows(scores.topk(2, dim=-1)[1]) == [[0, 1], [2, 3], [0, 1]]
            assert rows(scores.topk(1, dim=0)[1]) == [[0, 1, 2, 0]]
            assert rows(scores.argmax(-1)) == [0, 1, 2]
            assert torch.nn.functional.one_hot(scores.topk(2)[1], 4).sum((0, 1)).tolist() == [2, 2, 1, 1]
            assert torch.rand([]).item() == 0.5
