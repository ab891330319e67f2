"""`zm.Sharding`: a value; and the versions that integrations know."""

from __future__ import annotations

import inspect
from dataclasses import fields

import pytest
from typing_extensions import override

import zeromesh as zm
from zeromesh.errors import InputError, MeshError, NotationError
from zeromesh.integrations import versions
from zeromesh.integrations.versions import require_attributes, require_known, require_overridden

MESH = {"cluster": 2, "node": 4}
WORKLOAD = zm.Workload(seq_len=8, global_batch_tokens=64)
APART = {"strategy": "node=3,cluster=1", "mesh": MESH}


def test_takes_what_shard_takes() -> None:
    expected = {name: option.default for name, option in inspect.signature(zm.shard).parameters.items()}
    del expected["model"]
    own = {field.name: field.default for field in fields(zm.Sharding)}
    assert own.keys() == expected.keys()
    assert [name for name in own if own[name] != expected[name]] == ["strategy", "mesh"]  # whose default is no option
    # Equal meaning is equal.
    named = zm.Sharding(strategy="node[2]=3,node[2]=3,cluster=1", mesh=MESH, resident=["3"])
    assert named == zm.Sharding(strategy="node=3,cluster=1", mesh=tuple(MESH.items()), resident=("3",))
    assert hash(named) == hash(zm.Sharding(strategy="node=3,cluster=1", mesh=MESH, resident=["3"]))
    assert zm.Sharding(strategy="zero3", param_dtype="torch.bfloat16").param_dtype == "bf16"
    parts = {"*.a": zm.Part(strategy="ddp"), "*.b": zm.Part()}
    apart = zm.Sharding(strategy="zero3|*.b:node=0,cluster=1", mesh=MESH, parts=parts)
    assert hash(apart) == hash(zm.Sharding(strategy=str(apart.strategy), mesh=MESH, parts=dict(parts)))
    assert zm.Sharding(strategy="zero3", mesh=MESH) == zm.Sharding(strategy="node=3,cluster=3", mesh=MESH)
    planned_later = zm.Sharding(strategy="auto", mesh=MESH, cluster="a800-8x-hdr", workload=WORKLOAD)
    assert planned_later.strategy == "auto"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"strategy": "auto"}, InputError, 'strategy "auto" needs a mesh'),
        ({"strategy": "auto", "mesh": MESH, "cluster": "a800-8x-hdr"}, InputError, 'strategy "auto" needs a mesh'),
        ({"strategy": "node=3", "workload": WORKLOAD}, InputError, 'only apply to strategy "auto"; got strategy'),
        ({"strategy": "nod=3,cluster=1", "mesh": MESH}, MeshError, "no axis 'nod'.*did you mean node"),
        ({"strategy": "node=9,cluster=1", "mesh": MESH}, NotationError, "9"),
        ({"strategy": "node=9"}, NotationError, "9"),
        ({"strategy": "node=3", "master_dtype": "bf"}, InputError, "master_dtype must be one of .*: did you mean bf16"),
        (
            APART | {"strategy": "node=3,cluster=1|*.a: node=1"},
            MeshError,
            r"part \*\.a: .* gives no stage to mesh axis",
        ),
        (APART | {"parts": {"*.a": zm.Part(strategy="rank=3")}}, MeshError, r"part \*\.a: the mesh has no axis 'rank'"),
        ({"strategy": "node=3", "mesh": {"node": 0}}, InputError, "a mesh is sizes by name, .* got {'node': 0}"),
        ({"strategy": "node=3", "mesh": {}}, InputError, "a mesh is sizes by name"),
        ({"strategy": "node=3", "mesh": (("node", 2), ("node", 2))}, InputError, "a mesh is sizes by name"),
    ],
)
def test_says_what_is_wrong_when_it_is_made(options, error, message) -> None:
    with pytest.raises(error, match=message):
        zm.Sharding(**options)


def test_other_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    require_known("peft")
    monkeypatch.setattr(versions, "version", lambda library: "0.3.1")
    with pytest.raises(InputError, match=r"was written for peft <.*, and 0.3.1 is installed, .*zeromesh\[peft\]"):
        require_known("peft")


class Ours:
    @override
    def _save(self, directory: str) -> None: ...
    @override
    def _load(self, **options: object) -> None: ...


class AsKnown:
    def _save(self, directory: str) -> None: ...
    def _load(self, directory: str) -> None: ...


class WithoutSave:
    def _load(self) -> None: ...


class SaveTakesMore(AsKnown):
    def _save(self, directory: str, step: int) -> None: ...  # type: ignore[override]


@pytest.mark.parametrize(
    ("check", "message"),
    [
        (lambda: require_overridden("peft", Ours, WithoutSave), "peft 0.*: WithoutSave has no _save. Install an older"),
        (lambda: require_overridden("peft", Ours, SaveTakesMore), "SaveTakesMore._save takes step as well"),
        (lambda: require_attributes("peft", AsKnown(), "_save", "_models"), "AsKnown has no _models"),
    ],
)
def test_private_parts_that_a_library_has_changed_are_named(check, message) -> None:
    require_overridden("peft", Ours, AsKnown)
    with pytest.raises(InputError, match=message):
        check()


def test_the_package_lists_its_public_names_alone() -> None:
    assert dir(zm) == sorted(zm.__all__)
