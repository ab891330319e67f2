"""`zeromesh import`: another library's configuration in our notation and keys."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zeromesh.cli.probe import MeshText


def imports(
    file: Annotated[Path, typer.Argument(help="A DeepSpeed JSON, accelerate or FSDP YAML or torchtitan TOML file.")],
    mesh: MeshText = "",
) -> None:
    """Print the strategy of another library's configuration, its keys as `zeromesh train` has them, and the others.

    Without --mesh the sizes are the file's own. Where it has none, a group of ranks that shard is taken to be a node.
    """
    from zeromesh.measure.launch import parse_mesh
    from zeromesh.planner.foreign import read_foreign

    print(read_foreign(file).to_toml(tuple(parse_mesh(mesh).items())[::-1] if mesh else ()))
