"""`zeromesh import`: another library's configuration in our notation and keys."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zeromesh.cli.probe import MeshText


def imports(
    file: Annotated[
        Path, typer.Argument(help="A DeepSpeed JSON, an accelerate or FSDP YAML or JSON, or a torchtitan TOML file.")
    ],
    mesh: MeshText = "",
) -> None:
    """Convert another library's configuration for `zeromesh train`.

    The output has the strategy and the keys with an equivalent, and all other keys as comments. Without --mesh, sizes
    come from the file. If it has none, a group of ranks that shard is taken to be a node.
    """
    from zeromesh.measure.launch import parse_mesh
    from zeromesh.planner.foreign import read_foreign

    print(read_foreign(file).to_toml(tuple(parse_mesh(mesh).items())[::-1] if mesh else ()))
