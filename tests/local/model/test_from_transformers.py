"""The config of any architecture that transformers has is a model to plan for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.architectures import planned_flops, real_flops
from zeromesh.errors import ModelError
from zeromesh.model import huggingface
from zeromesh.model.from_transformers import trained_as
from zeromesh.model.load import load_model
from zeromesh.model.spec import ModelSpec

SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL |= {"num_key_value_heads": 2, "vocab_size": 50}


def load(directory: Path, seq_len: int | None = 32, **config: Any) -> ModelSpec:
    path = directory / "config.json"
    path.write_text(json.dumps(SMALL | config))
    return load_model(str(path), seq_len=seq_len, dtype="fp32")


PAIR = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
ROUTED = {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 8}

SWITCH = {"d_model": 16, "d_ff": 32, "d_kv": 8, "num_heads": 2, "num_experts": 4}
SWITCH |= {"num_layers": 2, "num_decoder_layers": 2}


@pytest.mark.parametrize(
    ("model_type", "more", "seq_len"),
    [
        ("jetmoe", ROUTED, 31),  # asks how many tokens each expert has
        ("m2m_100", PAIR, 31),  # two stacks, whose layers are dropped at random
        ("switch_transformers", SWITCH, 31),  # names no start of labels, and casts a layer while it runs
    ],
)
def test_what_is_read_is_what_torch_counts(tmp_path: Path, model_type: str, more: Any, seq_len: int) -> None:
    """All parameters, and the FLOPs of a real step, forward and backward."""
    from transformers import AutoConfig

    found = load(tmp_path, seq_len, model_type=model_type, **more)
    quiet = {"attention_dropout": 0.0, "dropout": 0.0, "dropout_rate": 0.0}
    config = AutoConfig.for_model(model_type, **(SMALL | more), **quiet, encoder_layerdrop=0.0, decoder_layerdrop=0.0)
    built = trained_as(config).from_config(config).train()
    assert found.num_params == sum(parameter.numel() for parameter in built.parameters())
    assert planned_flops(found, seq_len) == pytest.approx(real_flops(built, seq_len), rel=1e-4)


def test_transformers_has_nothing_to_warn_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows no loss by the name of GPT-2's class."""
    warned: list[str] = []
    monkeypatch.setattr("transformers.modeling_utils.logger.warning_once", warned.append)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": 50}
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"model_type": "gpt2"}))
    assert load_model(str(tmp_path), seq_len=32).num_params > 0 and not warned


def test_models_that_are_choosy(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL | {"model_type": "fnet"}))
    found = load_model(str(tmp_path), seq_len=32, dtype="bf16")
    assert found.dtype == "bf16"
    assert found.assumed == (
        "fft_fftn takes no bf16, and is computed in fp32, as under autocast: without it this model does not run",
    )
    # A model of one length is read at that.
    chunks = {"attn_layers": ["local", "lsh"], "axial_pos_shape": [8, 16], "axial_pos_embds_dim": [8, 8]}
    assert load(tmp_path, 128, model_type="reformer", **chunks).num_layers == 2
    with pytest.raises(ModelError, match=r"padding your sequence length to 128 .* or the --seq-len that it asks for"):
        load(tmp_path, 64, model_type="reformer", **chunks)


def test_a_kernel_skips_what_a_causal_mask_hides_and_nothing_else(tmp_path: Path) -> None:
    rotary = load(tmp_path, 32, model_type="qwen3", max_position_embeddings=24, head_dim=8)
    assert rotary.max_seq_len is None  # a table of positions ends the sequence: below
    for spec, causal in ((load(tmp_path, model_type="bert"), 0.0), (rotary, 1.0)):
        assert {unit.attention.causal for unit in spec.units if unit.attention} == {causal}


def test_defaults_are_those_of_the_classes() -> None:
    from transformers import CONFIG_MAPPING

    for model_type, defaults in huggingface._DEFAULTS.items():
        known = CONFIG_MAPPING[model_type]
        # Mistral's and Qwen2's classes have no biases to switch.
        absent = {key for key in defaults if not hasattr(known, key)}
        assert absent <= {"attention_bias", "mlp_bias", "head_dim"}, model_type
        assert {key: getattr(known, key) for key in defaults if key not in absent} == {
            key: value for key, value in defaults.items() if key not in absent
        }
        assert huggingface._ALIASES.get(model_type, {}) == known.attribute_map
    assert set(huggingface._DEFAULTS) == set(huggingface._FIELDS)


def test_what_cannot_be_built_or_run_is_one_message(tmp_path: Path) -> None:
    for model_type, more, message in (
        ("lama", {}, "one that transformers knows, got 'lama'; did you mean"),
        ("vit", {}, r"ViTModel has been built, .*; or give the config's keys .* Beside ids it takes pixel"),
        ("bert", {"num_attention_heads": 3}, r"cannot build model_type 'bert' .*: \w+: .*Give the config.json"),
        ("bert", {"seq_len": None}, "seq_len is required"),
    ):
        with pytest.raises(ModelError, match=message):
            load(tmp_path, model_type=model_type, **more)


def test_a_table_of_positions_ends_the_sequence(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has 24 positions, and the sequence has 32 tokens"):
        load(tmp_path, 32, model_type="opt", max_position_embeddings=24, word_embed_proj_dim=16, ffn_dim=32)
    with pytest.raises(ModelError, match="has 30 positions"):  # two rows are set apart
        load(tmp_path, 32, model_type="roberta", max_position_embeddings=32)


def test_remote_code_is_named_and_nothing_is_suggested_in_its_place(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="'chatglm' is remote code") as found:
        load(tmp_path, model_type="chatglm", auto_map={"AutoModel": "modeling_chatglm.ChatGLMModel"})
    assert "did you mean" not in str(found.value) and "modeling_chatglm.ChatGLMModel" in str(found.value)
