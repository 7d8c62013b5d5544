"""What torchrun's variables say, and the messages if they are broken."""

from __future__ import annotations

import socket

import pytest

from spark_hvd.world.env import read_launch_env
from spark_hvd.world.layout import Endpoint

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "2",
}


def test_torchrun() -> None:
    env = read_launch_env(TORCHRUN)
    assert env is not None
    assert (env.rank, env.size, env.node, env.endpoint) == (3, 4, "1", Endpoint("10.0.0.1", 29500))
    assert env.store_is_hosted
    assert env.generation == 2


def test_bare_variables() -> None:
    env = read_launch_env({key: TORCHRUN[key] for key in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")})
    assert env is not None
    assert env.node == env.host == socket.gethostname()
    assert not env.store_is_hosted
    assert env.generation == 0


def test_no_launcher() -> None:
    assert read_launch_env({"MASTER_ADDR": "10.0.0.1", "LOCAL_RANK": "0"}) is None


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_missing(missing: str) -> None:
    with pytest.raises(ValueError, match=f"{missing} is not set"):
        read_launch_env({key: value for key, value in TORCHRUN.items() if key != missing})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RANK", "4"),
        ("RANK", "-1"),
        ("RANK", "one"),
        ("WORLD_SIZE", "0"),
        ("MASTER_PORT", "65536"),
        ("MASTER_PORT", ""),
    ],
)
def test_out_of_range(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"{name}='{value}'"):
        read_launch_env({**TORCHRUN, name: value})
