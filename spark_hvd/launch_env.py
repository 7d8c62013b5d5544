"""The one place of the core where environment variables are read: what a launcher says about this process."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from spark_hvd.world import Endpoint


@dataclass(frozen=True, slots=True)
class LaunchEnv:
    """What a launcher that follows torchrun's conventions put into the environment."""

    rank: int
    size: int
    node: str
    """Tells hosts apart: torchrun's GROUP_RANK, else the host's name."""
    host: str
    endpoint: Endpoint
    store_is_hosted: bool
    """Whether the launcher itself serves the key-value store; else rank 0 does."""
    generation: int
    """torchrun's restart count."""


def read_launch_env(env: Mapping[str, str] | None = None) -> LaunchEnv | None:
    """Read torchrun's variables; None if no launcher set them (no RANK and no WORLD_SIZE).

    Args:
        env: The environment, ``os.environ`` by default.

    Raises:
        ValueError: A variable is missing or is no number in its range.
    """
    env = os.environ if env is None else env
    if "RANK" not in env and "WORLD_SIZE" not in env:
        return None
    size = _number(env, "WORLD_SIZE", 1, None)
    host = socket.gethostname()
    return LaunchEnv(
        rank=_number(env, "RANK", 0, size - 1),
        size=size,
        node=env.get("GROUP_RANK", host),
        host=host,
        endpoint=Endpoint(_text(env, "MASTER_ADDR"), _number(env, "MASTER_PORT", 1, 65535)),
        store_is_hosted=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        generation=int(env.get("TORCHELASTIC_RESTART_COUNT", "0")),
    )


def _text(env: Mapping[str, str], name: str) -> str:
    try:
        return env[name]
    except KeyError:
        raise ValueError(
            f"{name} is not set, though RANK or WORLD_SIZE is. A launcher such as torchrun sets RANK, WORLD_SIZE, "
            "MASTER_ADDR and MASTER_PORT together; unset all of them to run as a world of one."
        ) from None


def _number(env: Mapping[str, str], name: str, least: int, most: int | None) -> int:
    text = _text(env, name)
    wanted = f"a whole number from {least}" + ("" if most is None else f" to {most}")
    if not text.isdecimal() or int(text) < least or (most is not None and int(text) > most):
        raise ValueError(f"{name}={text!r} in the environment is not {wanted}; the launcher must set it.")
    return int(text)
