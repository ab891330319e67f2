"""Presets against figures that their authors published, to the last digit; and the reader of config.json."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zeromesh.cluster.catalogue import preset as cluster
from zeromesh.errors import ClusterError, InputError, ModelError
from zeromesh.model.load import load_model, with_kernels
from zeromesh.model.presets import preset, preset_names
from zeromesh.model.shape import COMPILED, EAGER, FUSED, LIGER, MEGATRON, Kernels
from zeromesh.model.spec import Recomputation, UnitKind
from zeromesh.model.trainable import with_trainable
from zeromesh.simulator.run import simulate
from zeromesh.simulator.workload import FixedWorkload

PUBLISHED = """
llama-7b 6738415616    llama-13b 13015864320   llama-30b 32528943616  llama-65b 65285660672  llama2-70b 68976648192
llama3-8b 8030261248   llama3-70b 70553706496  llama3-405b 405853388800  amsp-30b 27573049344  gpt-20b 20554567680
gpt2 124439808         gpt2-xl 1557611200      mixtral-8x7b 46702792704  qwen2-7b 7615616512   mpt-125m 125311488
mpt-350m 355985408     mpt-760m 760470528      mpt-1b 1315950592      mpt-3b 2651837440       mpt-7b 6658859008
mpt-13b 12853954560    mpt-30b 29975214080     mpt-70b 64862437376
"""


def test_parameters_are_those_published() -> None:
    words = PUBLISHED.split()
    published = dict(zip(words[::2], map(int, words[1::2]), strict=True))
    for name in preset_names():
        model = preset(name)
        assert model.num_params == published.get(name, model.num_params), name
        assert sum(unit.count * unit.num_params for unit in model.units) == model.num_params and model.source
    assert set(published) <= set(preset_names())


def test_units_are_entered_root_first_and_tied_weights_stay_with_the_root() -> None:
    untied, tied = preset("llama-7b"), preset("gpt2")
    assert [(unit.kind, unit.count) for unit in untied.units] == [
        (UnitKind.ROOT, 1),
        (UnitKind.EMBEDDING, 1),
        (UnitKind.BLOCK, 32),
        (UnitKind.HEAD, 1),
    ]
    assert [unit.kind for unit in tied.units] == [UnitKind.ROOT, UnitKind.BLOCK]
    assert "transformer.wte.weight" in {tensor.name for tensor in tied.units[0].tensors}


def test_model_flops_by_hand() -> None:
    """72 L h^2 (1 + s/(6h) + V/(12 L h)), for a model whose feed-forward network is 4h (arXiv 2104.04473, eq. 3).

    Megatron's formula leaves out norms and biases: .1 % of gpt-20b.
    """
    model, seq_len = preset("gpt-20b"), 2048
    layers, hidden, vocab = model.num_layers, model.hidden, model.vocab
    megatron = 72 * layers * hidden**2 * (1 + seq_len / (6 * hidden) + vocab / (12 * layers * hidden))
    assert model.model_flops_per_token(seq_len) == pytest.approx(megatron, rel=2e-3)
    # Model flops leave out the input embedding and idle experts.
    dense, sparse = preset("llama-7b"), preset("mixtral-8x7b")
    attention = 12 * 32 * 4096 * 1024
    assert dense.model_flops_per_token(1024) == 6 * (6738415616 - 32000 * 4096) + attention
    idle = 32 * 6 * 3 * 4096 * 14336  # six of eight experts in each of 32 layers
    assert sparse.model_flops_per_token(1024) == pytest.approx(
        6 * (46702792704 - 32000 * 4096 - idle) + attention, rel=1e-12
    )


def test_trainable_parts_cost_more_than_frozen_ones() -> None:
    model = with_trainable(preset("llama-7b"), "lora:16")
    frozen = preset("llama-7b").num_params - 32000 * 4096
    expected = 4 * frozen + 6 * model.num_trainable + 12 * 32 * 4096 * 1024
    assert model.model_flops_per_token(1024) == expected
    # LoRA adapts every linear layer of the blocks.
    model = with_trainable(preset("llama-7b"), "lora:8")
    hidden, ffn = 4096, 11008
    assert model.num_trainable == 32 * 8 * (4 * (hidden + hidden) + 3 * (hidden + ffn))
    assert model.num_params == preset("llama-7b").num_params + model.num_trainable


@pytest.mark.parametrize(("name", "rel"), [("llama-13b", 1e-6), ("mixtral-8x7b", 1e-4)])
@pytest.mark.parametrize("fraction", ["0.0625", "0.5"])
def test_a_fraction_trains_that_share_of_every_tensor(fraction: str, name: str, rel: float) -> None:
    """This holds for each expert too; a router's 8 rows train at least one."""
    full = preset(name)
    model = with_trainable(full, fraction)
    assert model.num_params == full.num_params
    assert model.num_trainable == pytest.approx(float(fraction) * full.num_params, rel=rel)
    for ours, theirs in zip(model.units, full.units, strict=True):
        assert not ours.matmuls or ours.backward_flops(512) < theirs.backward_flops(512)


def test_wrong_trainable_says_what_was_expected() -> None:
    for choice in ("none", "0", "1.5", "-1", "lora:", "lora:0", "lora:x", "nan"):
        with pytest.raises(ModelError, match="trainable"):
            with_trainable(preset("llama-7b"), choice)


def test_activations_by_hand() -> None:
    """LLaMA-7B, bf16: two unfused RMS norms (4h + 2h + 2h + 4), q k v out (8h), log-sum-exp (4 * 32), SwiGLU (8f)."""
    block = preset("llama-7b").units[2]
    assert block.saved_bytes(4096, Recomputation.NONE) == 2 * (8 * 4096 + 4) + 8 * 4096 + 4 * 32 + 8 * 11008
    fused = preset("llama-7b", kernels=FUSED).units[2]
    assert fused.saved_bytes(4096, Recomputation.NONE) == 2 * (4 * 4096 + 4) + 8 * 4096 + 4 * 32 + 8 * 11008
    # SwiGLU keeps gate, up and product (6f), the loss one copy of the logits (2V) beside the head's input (2h).
    *_, block, head = preset("llama-7b", kernels=MEGATRON).units
    assert block.saved_bytes(4096, Recomputation.NONE) == 2 * (4 * 4096 + 4) + 8 * 4096 + 4 * 32 + 6 * 11008
    assert head.saved_bytes(4096, Recomputation.NONE) == 8 + 2 * 4096 + 2 * 32000
    # Liger's head keeps its input alone; a compiled block does not keep the result of its last product.
    assert preset("llama-7b", kernels=LIGER).units[3].saved_bytes(4096, Recomputation.NONE) == 8 + 2 * 4096
    compiled = preset("llama-7b", kernels=COMPILED).units[2]
    kept, less = (unit.saved_bytes(4096, Recomputation.SELECTIVE) for unit in (fused, compiled))
    assert kept - less == 2 * 4096 and compiled.activations.elementwise == fused.activations.elementwise
    *_, fused_block, _ = preset("llama-7b", kernels=FUSED).units
    assert block.activations.elementwise.constant < fused_block.activations.elementwise.constant
    # LLaMA-7B in bf16: 24 bytes for each of 32 heads' scores, as many as the sequence is long; fused, none.
    unfused = preset("llama-7b", kernels=Kernels(fused_norm=False, fused_attention=False)).units[2].activations
    assert unfused.elementwise.per_context == 24 * 32
    assert preset("llama-7b").units[2].activations.elementwise.per_context == 0


def test_products_of_blocks_in_fp8_are_cast_and_take_the_device_s_rate() -> None:
    model = preset("llama-7b")
    eight = with_kernels(model, replace(EAGER, products="fp8"))
    assert [m.dtype for m in eight.units[2].matmuls] == ["fp8"] * 7 and eight.units[3].matmuls[0].dtype is None
    cast = eight.units[2].activations.elementwise.constant - model.units[2].activations.elementwise.constant
    assert cast == pytest.approx(3.6 * (6 * 4096 + 11008))
    work = FixedWorkload(seq_len=4096, global_batch_tokens=8 * 4096, reduce_dtype="fp32")
    h100, a100 = cluster("h100-8x-ndr").take(8), cluster("a100-8x-hdr").take(8)
    step_s = [simulate(each, h100, "zero3", work, engine="fsdp").step_s for each in (model, eight)]
    assert 0.6 < step_s[1] / step_s[0] < 0.95
    with pytest.raises(ClusterError, match="no peak for fp8"):
        simulate(eight, a100, "zero3", work, engine="fsdp")
    with pytest.raises(InputError, match=r"engine zeromesh computes products in the dtype of the activations.*fsdp"):
        simulate(eight, h100, "zero3", work)


def test_kernels_of_a_model_that_was_read_move_at_most_twice_what_it_keeps() -> None:
    read = replace(preset("llama-7b"), built_from=None)
    eager, compiled = read.units[2], with_kernels(read, COMPILED).units[2]
    assert compiled.activations.elementwise.constant == 2 * eager.activations.saved_none.constant
    assert compiled.activations.saved_none == eager.activations.saved_none
    assert with_kernels(read, EAGER) is read


def test_peak_activations_lie_between_the_saved_and_the_saved_with_one_more_unit() -> None:
    model = preset("llama-7b")
    for kind in Recomputation:
        saved, peak = model.saved_activation_bytes(2048, kind), model.peak_activation_bytes(2048, kind)
        worst = max(unit.backward_peak_bytes(2048, kind) for unit in model.units)
        assert saved < peak <= saved + worst


def test_unknown_presets_and_long_sequences_are_refused() -> None:
    with pytest.raises(ModelError, match="did you mean llama-7b"):
        load_model("lama-7b")
    with pytest.raises(ModelError, match="2048 positions, and the sequence has 4096"):
        load_model("mpt-7b", seq_len=4096)


LLAMA_7B = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32}
LLAMA_7B |= {"num_attention_heads": 32, "vocab_size": 32000}


def write(tmp_path: Path, config: object) -> str:
    path = tmp_path / "config.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return str(path)


def test_a_config_equals_its_preset(tmp_path: Path) -> None:
    path = write(tmp_path, LLAMA_7B)
    assert load_model(path).units == load_model(str(tmp_path)).units == preset("llama-7b").units


@pytest.mark.parametrize(
    ("kind", "given", "kv_heads", "window"),
    [
        ("mistral", {}, 8, 4096),
        ("mistral", {"num_key_value_heads": None, "sliding_window": None}, 32, None),
        ("mistral", {"num_key_value_heads": 4, "sliding_window": 1024}, 4, 1024),
        ("mixtral", {"num_local_experts": 4}, 8, None),
        ("qwen2", {}, 32, None),
        ("llama", {}, 32, None),
        ("mixtral", {"num_experts": 4}, 8, None),
    ],
)
def test_a_key_that_is_missing_has_its_classs_default(
    tmp_path: Path, kind: str, given: dict[str, object], kv_heads: int, window: int | None
) -> None:
    model = load_model(write(tmp_path, LLAMA_7B | {"model_type": kind} | given))
    (block,) = (unit for unit in model.units if unit.kind is UnitKind.BLOCK)
    key = next(tensor for tensor in block.tensors if "k_proj.weight" in tensor.name)
    assert key.num_elements == kv_heads * 128 * 4096
    assert block.attention is not None and block.attention.window == window


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "not JSON"),
        ("[]", "a table of keys is required, got list"),
        ({}, "model_type is required"),
        ({"model_type": ["llama"]}, r"model_type \['llama'\] has no reader"),
        ({"hidden_size": None}, "hidden_size must be a whole number of at least 1, got None"),
        ({"hidden_size": "4096"}, "hidden_size must be a whole number of at least 1, got '4096'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a whole number of at least 1, got 0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"num_attention_heads": 33}, "hidden must be a multiple of heads, got 4096 and 33"),
        ({"num_key_value_heads": 5}, "heads must be a multiple of kv_heads, got 32 and 5"),
        (
            {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 8},
            "of 4 experts between 1 and all must be active per token, got 8",
        ),
    ],
)
def test_wrong_configs_name_the_key(tmp_path: Path, config: Any, message: str) -> None:
    changed = isinstance(config, dict) and config and list(config) != ["model_type"]
    with pytest.raises(ModelError, match=message):
        load_model(write(tmp_path, LLAMA_7B | config if changed else config))
    weights = tmp_path / "weights.safetensors"
    weights.write_bytes(bytes([8, 0, 0, 0, 0, 0, 0, 0]) + b"{}      " + bytes([0x80, 0x3F]))
    with pytest.raises(ModelError, match=r"weights\.safetensors: cannot be read as a config\.json: not UTF-8"):
        load_model(str(weights))
    with pytest.raises(ModelError, match=r"cannot be read as a config\.json: No such file"):
        load_model("nowhere/config.json")


def test_quantised_weights_are_frozen_codes_beside_adapters(tmp_path: Path) -> None:
    path = write(tmp_path, LLAMA_7B | {"quantization_config": {"load_in_4bit": True}})
    with pytest.raises(ModelError, match=r"weights are codes, which do not train. Give --trainable lora:16"):
        load_model(path)
    coded, plain = (load_model(each, trainable="lora:8") for each in (path, "llama-7b"))
    query = coded.units[2].tensors[0]
    assert (query.shape, query.dtype, query.packed, query.trainable) == ((4096, 2048), "code u8", 2, False)
    assert coded.num_trainable == plain.num_trainable
    assert coded.model_flops_per_token(2048) == plain.model_flops_per_token(2048)
    assert with_kernels(coded, COMPILED).units[2].tensors == coded.units[2].tensors
    write(tmp_path, LLAMA_7B | {"quantization_config": {"quant_method": "gptq", "bits": 3}})
    with pytest.raises(ModelError, match=r"gptq or awq with 4 or 8 bits, fp8 or mxfp4, got .*'bits': 3"):
        load_model(path, trainable="lora:8")


def test_adapters_lead_to_their_base(tmp_path: Path) -> None:
    write(tmp_path, LLAMA_7B)
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    (adapters / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "..", "r": 8}))
    assert load_model(str(adapters)).units == load_model("llama-7b", trainable="lora:8").units
    (adapters / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "meta/nowhere", "r": 8}))
    with pytest.raises(ModelError, match=r"adapters of meta/nowhere, whose config.json is not here.*lora:8"):
        load_model(str(adapters))
