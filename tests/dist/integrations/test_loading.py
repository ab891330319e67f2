"""Models that each rank reads its slices of, against the same models loaded whole."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

import zeromesh as zm
from tests.dist.integrations.hugging import SIZES, build
from tests.dist.parity import mesh_of
from tests.dist.pool import on_ranks
from zeromesh.checkpoint.safetensors import Stored
from zeromesh.engine.param import ShardedParameter
from zeromesh.errors import CheckpointError, InputError, MismatchError, ModelError
from zeromesh.modules import lacks_values


def saved(directory: Path, kind: str) -> Any:
    """A model with values that no initialisation gives, in files of its own names as well as of the hub's."""
    import transformers as hf

    if dist.get_rank() == 0:
        torch.manual_seed(0)
        experts = {"num_local_experts": 3, "num_experts_per_tok": 2}
        vision: dict[str, Any] = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8}
        sound: dict[str, Any] = {"conv_dim": [4], "conv_stride": [2], "conv_kernel": [3], "num_conv_pos_embeddings": 4}
        sound |= {"num_conv_pos_embedding_groups": 2}
        model: Any = {
            "packed experts": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**SIZES, **experts)),
            "cut in three": lambda: hf.RadioModel(hf.RadioConfig(**vision, patch_size=4)),
            "tied head first": lambda: hf.XLMRobertaForCausalLM(hf.XLMRobertaConfig(**SIZES, is_decoder=True)),
            "never on meta": lambda: hf.Wav2Vec2Model(hf.Wav2Vec2Config(**SIZES, **sound)),
            "bf16": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, tie_word_embeddings=True)).bfloat16(),
        }[kind]()
        with torch.no_grad():
            for tensor in model.state_dict().values():
                tensor.add_(torch.rand_like(tensor)) if tensor.is_floating_point() else None
        model.save_pretrained(directory, max_shard_size="3KB")
    dist.barrier()


@pytest.mark.parametrize("kind", ["packed experts", "cut in three", "tied head first", "never on meta", "bf16"])
@on_ranks(2)
def test_values_are_those_of_the_library(kind, tmp_path):
    import transformers as hf

    saved(tmp_path, kind)
    speaks = kind not in ("cut in three", "never on meta")
    expected = (hf.AutoModelForCausalLM if speaks else hf.AutoModel).from_pretrained(tmp_path)
    model = zm.from_pretrained(type(expected), tmp_path)
    assert all(map(lacks_values, model.parameters()))
    mesh = mesh_of(2)
    zm.shard(model, mesh, "node=3")
    assert all(isinstance(parameter, ShardedParameter) for parameter in model.parameters())
    assert {name: tensor.dtype for name, tensor in model.named_buffers()} == {
        name: tensor.dtype for name, tensor in expected.named_buffers()
    }
    for (name, found), buffer in zip(model.named_buffers(), expected.buffers(), strict=True):
        assert torch.equal(found, buffer), name
    whole = zm.full_state_dict(model)
    for name, value in expected.state_dict().items() if dist.get_rank() == 0 else ():
        assert torch.equal(whole[name].to(value.dtype), value), name
    if speaks:
        ids = torch.arange(3, 15)[None]
        assert torch.equal(model(ids).logits, expected(ids).logits)
        assert model.generation_config.to_dict() == expected.generation_config.to_dict()
    # And files of one that is made anew are loaded, and written as the library writes them.
    other = zm.shard(type(expected)(expected.config).to(expected.dtype), mesh, "node=1")
    zm.load_safetensors(other, tmp_path)
    for index, own in enumerate((model, other)):
        zm.save_safetensors(own, tmp_path / f"{index}", max_file_bytes=3000)
        if dist.get_rank() == 0:
            torch.testing.assert_close(files(tmp_path / f"{index}"), files(tmp_path), rtol=0, atol=0)
    dist.barrier()


def files(directory: Path) -> dict[str, Tensor]:
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


def base(directory: Path, *, whole: bool) -> Any:
    import transformers as hf

    if whole:
        return hf.AutoModelForCausalLM.from_pretrained(directory)
    return zm.from_pretrained(hf.AutoModelForCausalLM, directory)


@pytest.mark.parametrize("strategy", ["node=0", "node=3"])
@on_ranks(2)
def test_adapters_keep_what_they_have(strategy, tmp_path):
    """The library's initialisation, made for buffers that no file has, sees all modules of a unit, and where nothing
    is sharded of all units that are joined."""
    import peft

    if dist.get_rank() == 0:
        build().save_pretrained(tmp_path)
    dist.barrier()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model = peft.get_peft_model(base(tmp_path, whole=False), peft.LoraConfig(r=2, target_modules="all-linear"))
    with torch.no_grad():  # as trained ones, of which no number is an initialisation's
        before = {name: param.add_(1).clone() for name, param in model.named_parameters() if param.requires_grad}
    zm.shard(model, mesh_of(2), strategy)
    whole = zm.full_state_dict(model)
    assert len(before) == 28
    for name, value in before.items() if dist.get_rank() == 0 else ():
        assert torch.equal(whole[name], value), name


CHANGES: dict[str, Any] = {
    "in place": lambda model: model.model.norm.weight.mul_(2.0),
    "through what shows it": lambda model: model.lm_head.weight.data.detach().add_(1.0),
    "by an initialisation": lambda model: torch.nn.init.constant_(model.model.norm.weight, 3.0),
    "by a state dict": lambda model: model.load_state_dict({"model.norm.weight": torch.full((8,), 3.0)}, strict=False),
    "by another tensor": lambda model: setattr(model.lm_head.weight, "data", torch.ones(23, 8)),
    "untied": lambda model: setattr(model.lm_head, "weight", torch.nn.Parameter(model.lm_head.weight.detach().clone())),
    "new tokens": lambda model: model.resize_token_embeddings(30),
    "dtype": lambda model: model.bfloat16(),
    "dtype and back": lambda model: model.bfloat16().float(),
    "copied": lambda model: setattr(model, "model", copy.deepcopy(model.model)),
    "fewer layers": lambda model: setattr(model.model, "layers", model.model.layers[1:]),
}


@on_ranks(1)
def test_what_is_done_before_it_is_sharded_is_done_to_the_values(tmp_path):
    build("tied").save_pretrained(tmp_path)
    for change, act in CHANGES.items():
        found: dict[bool, dict[str, Any]] = {}
        for whole in (True, False):
            model = base(tmp_path, whole=whole)
            torch.manual_seed(1)
            with torch.no_grad():
                act(model)
            found[whole] = model.state_dict() if whole else zm.full_state_dict(zm.shard(model, None, "node=3"))
        assert found[True].keys() == found[False].keys(), change
        for name, value in found[True].items():
            assert torch.equal(found[False][name], value.to(found[False][name].dtype)), (change, name)


ADAPTERS: dict[str, dict[str, Any]] = {
    "a copy of a tied head": {"modules_to_save": ["lm_head"]},
    "tokens": {"trainable_token_indices": [1, 5]},
    "PiSSA": {"init_lora_weights": "pissa"},
    "DoRA": {"use_dora": True},
}


@on_ranks(1)
def test_adapters_made_of_the_base_s_values(tmp_path):
    """Made anew, and loaded: those are written into PEFT's copies from the base."""
    import peft

    build("tied").save_pretrained(tmp_path)

    def made(whole: bool, **options: Any) -> Any:
        torch.manual_seed(1)
        adapters = peft.LoraConfig(r=2, target_modules=["q_proj"], **options)
        return peft.get_peft_model(base(tmp_path, whole=whole), adapters)

    def same(one: Any, other: Any) -> None:
        expected, found = one.state_dict(), zm.full_state_dict(zm.shard(other, None, "node=3"))
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value), name

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for options in ADAPTERS.values():
            same(made(True, **options), made(False, **options))
        trained = made(True, modules_to_save=["lm_head"])
        with torch.no_grad():
            for param in trained.parameters():
                param.add_(param.requires_grad)
        trained.save_pretrained(tmp_path / "adapters")
        loaded = [
            peft.PeftModel.from_pretrained(base(tmp_path, whole=whole), tmp_path / "adapters")
            for whole in (True, False)
        ]
        same(*loaded)


@on_ranks(1)
def test_nothing_is_read_before_it_is_sharded_that_nobody_asked_for(tmp_path, monkeypatch):
    import peft

    build().save_pretrained(tmp_path)
    reads: list[int] = []
    fill = Stored.fill

    def counted(self: Stored, target: torch.Tensor, start: int) -> None:
        reads.append(target.numel())
        fill(self, target, start)

    monkeypatch.setattr(Stored, "fill", counted)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model = base(tmp_path, whole=False).to("cpu").bfloat16().requires_grad_(False)
        model = peft.get_peft_model(
            model, peft.LoraConfig(r=2, modules_to_save=["lm_head"], target_modules="all-linear")
        )
    assert all(map(lacks_values, (param for name, param in model.named_parameters() if "lora" not in name)))
    assert torch.zeros_like(model.lm_head.original_module.weight).sum() == 0
    assert not reads and {str(param.device) for param in model.parameters()} == {"cpu"}
    with torch.no_grad():
        promised = list(filter(lacks_values, model.parameters()))
        plain = [each(param) for param in promised for each in (torch.clone, Tensor.float)]
    assert not any(isinstance(one, torch.nn.Parameter) or one.requires_grad for one in plain) and not reads
    twice = copy.deepcopy(model.lm_head)
    twice.weight.sum()
    assert reads == [23 * 8] and lacks_values(model.lm_head.original_module.weight)
    with pytest.raises(ModelError, match=r"model.rotary_emb.inv_freq is not in .* has no values before"):
        model.model.model.rotary_emb.inv_freq.mul_(2)


@on_ranks(2)
def test_a_new_head_begins_anew_and_is_named(tmp_path):
    import transformers as hf

    if dist.get_rank() == 0:
        build().save_pretrained(tmp_path)
    dist.barrier()
    expected = load_file(tmp_path / "model.safetensors")
    with pytest.warns(UserWarning, match=r"begins anew with score.weight; leaves out of the files lm_head.weight"):
        model = zm.from_pretrained(hf.AutoModelForSequenceClassification, tmp_path, num_labels=3)
    zm.shard(model, mesh_of(2), "node=3")
    whole = zm.full_state_dict(model)
    if dist.get_rank() == 0:
        assert whole["score.weight"].shape == (3, 8) and whole["score.weight"].std() > 0
        assert torch.equal(whole["model.norm.weight"], expected["model.norm.weight"])


@on_ranks(2)
def test_refuses(tmp_path):
    import transformers as hf

    first = dist.get_rank() == 0
    mesh = mesh_of(2)
    with pytest.raises(InputError, match="must be the directory of a model of transformers"):
        base(tmp_path / "none", whole=False)
    if first:
        build().save_pretrained(tmp_path / "plain")
        quantised = build()
        quantised.config.quantization_config = {"quant_method": "bitsandbytes"}
        quantised.config.save_pretrained(tmp_path / "quantised")
        build().save_pretrained(tmp_path / "quantised" / "there")
        (tmp_path / "quantised" / "there" / "model.safetensors").rename(tmp_path / "quantised" / "model.safetensors")
        build("tied").save_pretrained(tmp_path / "tied")
        held = load_file(tmp_path / "tied" / "model.safetensors")
        held["lm_head.weight"] = held["model.embed_tokens.weight"] + 1
        save_file(held, tmp_path / "tied" / "model.safetensors", metadata={"format": "pt"})
    dist.barrier()
    with pytest.raises(InputError, match=r"quantised \(bitsandbytes\)"):
        base(tmp_path / "quantised", whole=False)
    with pytest.raises(ModelError, match="are tied in the model and differ in the files"):
        base(tmp_path / "tied", whole=False)
    with pytest.raises(ModelError, match=r"have lm_head.weight of shape \(23, 8\), and the model has shape \(40, 8\)"):
        zm.from_pretrained(hf.AutoModelForCausalLM, tmp_path / "plain", vocab_size=40)
    grown = base(tmp_path / "plain", whole=False)
    grown.model.embed_tokens = torch.nn.Embedding(40, 8, device="meta")
    with pytest.raises(ModelError, match=r"model.embed_tokens.weight is on the meta device and was not there"):
        zm.shard(grown, mesh, "node=3")
    gone = base(tmp_path / "plain", whole=False)
    dist.barrier()
    if first:
        (tmp_path / "plain" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError if first else (CheckpointError, MismatchError), match="cannot be read"):
        zm.shard(gone, mesh, "node=3")
