"""The frame of the command line: help is quick and torch-free, wrong input is one message and exit code 2."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from zeromesh.cli import app as cli
from zeromesh.errors import InputError


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "zeromesh.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)


def test_version_is_printed() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout.split()[0]) == (0, "zeromesh")


def test_unknown_command_exits_with_2_and_no_traceback() -> None:
    done = run("trian")
    assert done.returncode == 2
    assert "trian" in done.stderr
    assert "Traceback" not in done.stderr


def test_input_error_is_one_message_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise InputError("strategy names axis 'rack', the mesh has node, cluster")

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(SystemExit) as exit_info:
        cli.main()
    assert exit_info.value.code == 2
    assert capsys.readouterr().err == "zeromesh: strategy names axis 'rack', the mesh has node, cluster\n"


def test_other_errors_of_zeromesh_are_one_line_on_each_rank() -> None:
    script = (
        "import sys\nfrom zeromesh.cli import app\nfrom zeromesh.errors import CommunicationError\n"
        "def fail():\n    raise CommunicationError('all_gather failed')\napp.app = fail\napp.main()"
    )
    for rank, who in (({}, ""), ({"RANK": "3"}, "rank 3 failed: ")):
        environment = {**{key: value for key, value in os.environ.items() if key != "RANK"}, **rank}
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (1, f"zeromesh: {who}all_gather failed\n")


def test_other_errors_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main()


def commands() -> list[str]:
    import typer.main

    group = typer.main.get_command(cli.app)
    found = getattr(group, "commands", {})
    return sorted(name for name, command in found.items() if not command.hidden)


@pytest.mark.parametrize("name", cli.IN_A_CHECKOUT)
@pytest.mark.parametrize("rest", [(), ("--help",), ("run", "2@1gbit", "--", "true"), ("--write", "docs/page.md")])
def test_commands_of_a_checkout_say_where_they_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, rest: tuple[str, ...]
) -> None:
    monkeypatch.setattr(sys, "argv", ["zeromesh", name, *rest])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"zeromesh: `zeromesh {name}` needs a checkout: `make {name}`\n"
    assert name not in commands()


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys\n"
        "from zeromesh.cli.app import main\n"
        f"for words in [[], *([name] for name in {commands()!r})]:\n"
        "    sys.argv = ['zeromesh', *words, '--help']\n"
        "    try:\n        main()\n"
        "    except SystemExit as stop:\n        assert not stop.code, (words, stop.code)\n"
        "    heavy = {'torch', 'transformers', 'numpy', 'rich.console'} & set(sys.modules)\n"
        "    assert not heavy, (words, heavy)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not any(f"\n  {name} " in done.stdout for name in cli.IN_A_CHECKOUT)
    assert all(f"\n  {name} " in done.stdout for name in commands())
