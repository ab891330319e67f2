"""Safetensors files that Hugging Face's own library reads, and the way back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.dist.checkpoint.models import Mesh, Odd, assemble, make, require_equal, slices
from tests.dist.pool import Pool
from zeromesh.errors import CheckpointError
from zeromesh.integrations.huggingface import load_safetensors, save_safetensors

FOUR: Mesh = (("cluster", 2), ("node", 2))
TWO: Mesh = (("cluster", 1), ("node", 2))


def export(directory: Path, strategy: str, max_file_bytes: int, dtype: torch.dtype | None):
    model, optimizer = make(FOUR, strategy)
    save_safetensors(model, directory, max_file_bytes=max_file_bytes, dtype=dtype)
    return slices(model, optimizer)


def read(directory: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in directory.glob("*.safetensors"):
        found |= load_file(path)
    return found


@pytest.mark.parametrize(
    ("strategy", "max_file_bytes", "files"), [("node=3,cluster=0", 10**9, 1), ("node=1,cluster=3", 400, 3)]
)
def test_files_are_what_the_library_reads(
    pool: Pool, tmp_path: Path, strategy: str, max_file_bytes: int, files: int
) -> None:
    expected = assemble(pool.run(4, export, tmp_path, strategy, max_file_bytes, None))
    found = read(tmp_path)
    require_equal({name: tensor.reshape(-1) for name, tensor in found.items()}, expected)
    assert found["kernel.weight"].shape == (3, 1, 2, 3) and found["none"].shape == (0, 3)
    assert len(list(tmp_path.glob("*.safetensors"))) >= files
    assert (tmp_path / "model.safetensors.index.json").exists() == (files > 1)
    assert not list(tmp_path.glob(".*"))


def test_floating_point_tensors_take_the_dtype_that_is_asked_for(pool: Pool, tmp_path: Path) -> None:
    expected = assemble(pool.run(4, export, tmp_path, "node=3,cluster=0", 10**9, torch.bfloat16))
    found = read(tmp_path)
    assert torch.equal(found["embed.weight"].reshape(-1), expected["embed.weight"].bfloat16())
    assert found["norm.num_batches_tracked"].dtype is torch.int64


def take(location: Path, strategy: str):
    model, optimizer = make(TWO, strategy, seed=1)
    load_safetensors(model, location)
    tokens = torch.tensor([2, 3, 5])
    return slices(model, optimizer), model.eval()(tokens).detach()


def test_what_the_library_writes_is_loaded_and_computed_with(pool: Pool, tmp_path: Path) -> None:
    torch.manual_seed(4)
    plain = Odd().eval()
    state = {name: tensor for name, tensor in plain.state_dict().items() if name != "head.weight"}
    save_file(state, tmp_path / "model.safetensors")
    for strategy in ("node=3,cluster=0", "node=2,cluster=0"):
        ranks = pool.run(2, take, tmp_path, strategy)
        require_equal(assemble([held for held, _ in ranks]), {n: t.reshape(-1) for n, t in state.items()})
        for _, logits in ranks:
            assert torch.equal(logits, plain(torch.tensor([2, 3, 5])))


def refusal(location: Path) -> str:
    model, optimizer = make(TWO, "node=3,cluster=0")
    before = {name: local for name, _, _, local in slices(model, optimizer)}
    with pytest.raises(CheckpointError) as caught:
        load_safetensors(model, location)
    require_equal({name: local for name, _, _, local in slices(model, optimizer)}, before)
    return str(caught.value)


def test_other_files_are_refused_with_the_reason(pool: Pool, tmp_path: Path) -> None:
    state = {name: tensor.contiguous() for name, tensor in Odd().state_dict().items() if name != "head.weight"}
    path = tmp_path / "model.safetensors"

    def message() -> str:
        first, second = pool.run(2, refusal, tmp_path)
        assert first == second
        return str(first)

    assert "has neither model.safetensors nor model.safetensors.index.json" in message()
    save_file({**state, "embed.wait": torch.zeros(1)}, path)
    assert "embed.wait: in the checkpoint, not in the model" in message()
    save_file({name: tensor for name, tensor in state.items() if name != "frozen"}, path)
    assert "frozen: in the model, not in the checkpoint" in message()
    save_file(state | {"frozen": torch.zeros(4)}, path)
    assert "frozen: shape (5,) in the model, (4,) in the checkpoint" in message()
    save_file(state | {"frozen": torch.zeros(5, dtype=torch.int8)}, path)
    assert "frozen: torch.float32 in the model, int8 in the checkpoint" in message()
    save_file(state, path)
    path.write_bytes(path.read_bytes()[:-10])
    assert "is damaged" in message()
    path.write_bytes(b"\xff" * 100)
    assert "is damaged: its header has" in message()
