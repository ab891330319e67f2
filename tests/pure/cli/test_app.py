"""The frame of the command line: help is quick and torch-free, wrong input is one message and exit code 2."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from zeromesh.cli import app as cli
from zeromesh.errors import InputError


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if key != "RANK"} | environment
    command = (sys.executable, *command)
    return subprocess.run(command, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)


def test_the_command_itself(zeromesh: Any) -> None:
    done = run("-m", "zeromesh.cli", "trian")
    assert done.returncode == 2
    assert "trian" in done.stderr
    assert "Traceback" not in done.stderr
    code, out, _ = zeromesh("--version")
    assert (code, out.split()[0]) == (0, "zeromesh")


def test_errors_that_are_ours_are_one_message_and_others_a_traceback(
    monkeypatch: pytest.MonkeyPatch, zeromesh: Any
) -> None:
    def failing(error: Exception) -> None:
        def fail() -> None:
            raise error

        monkeypatch.setattr(cli, "app", fail)

    failing(InputError("strategy names axis 'rack', the mesh has node, cluster"))
    assert zeromesh() == (2, "", "zeromesh: strategy names axis 'rack', the mesh has node, cluster\n")
    failing(RuntimeError("a bug"))
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main()


def test_other_errors_of_zeromesh_are_one_line_on_each_rank() -> None:
    script = (
        "import sys\nfrom zeromesh.cli import app\nfrom zeromesh.errors import CommunicationError\n"
        "def fail():\n    raise CommunicationError('all_gather failed')\napp.app = fail\napp.main()"
    )
    for rank, who in (({}, ""), ({"RANK": "3"}, "rank 3 failed: ")):
        done = run("-c", script, **rank)
        assert (done.returncode, done.stderr) == (1, f"zeromesh: {who}all_gather failed\n")


def commands() -> list[str]:
    import typer.main

    group = typer.main.get_command(cli.app)
    found = getattr(group, "commands", {})
    return sorted(name for name, command in found.items() if not command.hidden)


@pytest.mark.parametrize("name", cli.IN_A_CHECKOUT)
def test_commands_of_a_checkout_say_where_they_are(zeromesh: Any, name: str) -> None:
    for rest in ((), ("--help",), ("run", "2@1gbit", "--", "true"), ("--write", "docs/page.md")):
        assert zeromesh(name, *rest) == (2, "", f"zeromesh: `zeromesh {name}` needs a checkout: `make {name}`\n")
    assert name not in commands()


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys\n"
        "from zeromesh.cli.app import main\n"
        f"for words in [[], *([name] for name in {commands()!r})]:\n"
        "    sys.argv = ['zeromesh', *words, '--help']\n"
        "    try:\n        main()\n"
        "    except SystemExit as stop:\n        assert not stop.code, (words, stop.code)\n"
        "    heavy = {'torch', 'transformers', 'numpy', 'rich', 'jinja2', 'zeromesh.planner', 'zeromesh.cost'}\n"
        "    assert not heavy & set(sys.modules), (words, heavy & set(sys.modules))\n"
    )
    done = run("-c", script)
    assert done.returncode == 0, done.stderr
    assert not any(f"\n  {name} " in done.stdout for name in cli.IN_A_CHECKOUT)
    assert all(f"\n  {name} " in done.stdout for name in commands())
