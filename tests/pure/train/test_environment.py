"""What torchrun's variables say, and what is wrong with them where they cannot be right."""

from __future__ import annotations

import re

import pytest

from zeromesh.errors import ConfigError
from zeromesh.train.environment import Launched, check_address

SET = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
ADDRESS = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


def test_a_process_started_by_hand_has_no_launcher() -> None:
    assert Launched.of({"PATH": "/bin", "LOCAL_RANK": "7"}) is None


def test_variables_of_torchrun() -> None:
    restarted = {"TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_RUN_ID": "job-7"}
    assert Launched.of(SET | restarted) == Launched(
        rank=3, world=4, local_rank=1, local_world=2, restarts=2, job="job-7"
    )
    assert Launched.of({"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none"}) == Launched(
        rank=0, world=1, local_rank=0, local_world=1
    )


BROKEN = [
    ({"RANK": None}, "has WORLD_SIZE but not RANK"),
    ({"WORLD_SIZE": None}, "has RANK but not WORLD_SIZE"),
    ({"RANK": "first"}, "RANK must be a whole number of at least 0 and below WORLD_SIZE = 4; got 'first'"),
    ({"RANK": "4"}, "RANK must be a whole number of at least 0 and below WORLD_SIZE = 4; got '4'"),
    ({"RANK": "-1"}, "RANK must be"),
    ({"RANK": ""}, "RANK must be"),
    ({"WORLD_SIZE": "0"}, "WORLD_SIZE must be a whole number of at least 1; got '0'"),
    ({"WORLD_SIZE": "4.0"}, "WORLD_SIZE must be"),
    ({"LOCAL_RANK": "2"}, "LOCAL_RANK must be a whole number of at least 0 and below LOCAL_WORLD_SIZE = 2; got '2'"),
    ({"LOCAL_WORLD_SIZE": "5"}, "LOCAL_WORLD_SIZE must be"),
    ({"TORCHELASTIC_RESTART_COUNT": "often"}, "TORCHELASTIC_RESTART_COUNT must be"),
]


@pytest.mark.parametrize(("changes", "message"), BROKEN)
def test_what_cannot_be_right_is_named(changes: dict[str, str | None], message: str) -> None:
    environ = {name: value for name, value in (SET | changes).items() if value is not None}
    with pytest.raises(ConfigError, match=re.escape(message)):
        Launched.of(environ)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"MASTER_ADDR": None}, "MASTER_ADDR must say where rank 0 listens; it is not set"),
        ({"MASTER_ADDR": " "}, "it is empty"),
        ({"MASTER_PORT": None}, "MASTER_PORT must be a whole number of at least 1 and below 65536; it is not set"),
        ({"MASTER_PORT": "http"}, "below 65536; got 'http'"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT must be"),
    ],
)
def test_where_the_ranks_meet(changes: dict[str, str | None], message: str) -> None:
    check_address(ADDRESS)
    environ = {name: value for name, value in (ADDRESS | changes).items() if value is not None}
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_address(environ)
