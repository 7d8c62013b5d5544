"""The one place where the core reads environment variables: those that launchers and users of Horovod set."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from spark_hvd.world.config import Config
from spark_hvd.world.layout import Endpoint


@dataclass(frozen=True, slots=True)
class LaunchEnv:
    """Variables set by a launcher that follows torchrun's conventions."""

    rank: int
    size: int
    node: str
    """Identifies the host: torchrun's GROUP_RANK, else the host's name."""
    host: str
    endpoint: Endpoint
    store_is_hosted: bool
    """Whether the launcher itself serves the key-value store; else rank 0 does."""
    generation: int
    """How often torchrun has restarted the ranks."""


def read_launch_env(env: Mapping[str, str] = os.environ) -> LaunchEnv | None:
    """Read torchrun's variables; None if no launcher set them (no RANK and no WORLD_SIZE).

    Raises:
        ValueError: A variable is missing, not a number, or out of range.
    """
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


@dataclass(frozen=True, slots=True)
class MpiEnv:
    """Variables set by an MPI process manager."""

    rank: int
    size: int
    master: str | None
    """The address of rank 0 for the others, if the user has set one."""


def read_mpi_env(env: Mapping[str, str] = os.environ) -> MpiEnv | None:
    """Read the variables of MPICH's and Open MPI's mpiexec; None if neither started this process.

    Raises:
        ValueError: A variable is missing, not a number, or out of range.
    """
    for rank, size in (("PMI_RANK", "PMI_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")):
        if rank in env and size in env:
            count = _number(env, size, 1, None)
            return MpiEnv(_number(env, rank, 0, count - 1), count, env.get("MASTER_ADDR"))
    return None


def read_mpi_cuda(env: Mapping[str, str] = os.environ) -> bool | None:
    """Return whether SPARK_HVD_MPI_CUDA says that MPI takes CUDA tensors; None if it is not set."""
    text = env.get("SPARK_HVD_MPI_CUDA", "")
    return None if text == "" else _truth(text)


def read_config(env: Mapping[str, str] = os.environ) -> Config:
    """Read Horovod's variables that mean something here, and ours; variables that are not set have our defaults.

    HOROVOD_CYCLE_TIME has no meaning, as there are no cycles. SPARK_HVD_SHARED_MEMORY and SPARK_HVD_DIALECT are ours.

    Raises:
        ValueError: A value is not a number, out of range, or not one of the allowed words.
    """
    values: dict[str, Any] = {}
    for variable, (name, kind) in _SETTINGS.items():
        text = env.get(f"HOROVOD_{variable}", "")
        if text:
            values[name] = _setting(f"HOROVOD_{variable}", text, kind)
    if (text := env.get("SPARK_HVD_SHARED_MEMORY", "")) != "":
        values["shared_memory"] = _truth(text)
    if text := env.get("SPARK_HVD_DIALECT", ""):
        values["dialect"] = text
    if _truth(env.get("HOROVOD_STALL_CHECK_DISABLE", "")):
        values["stall_warning"] = values["stall_timeout"] = None
    # In Horovod, 0 means never, and DYNAMIC "when start_timeline() is called", which is always possible here.
    if values.get("stall_timeout") == 0:
        values["stall_timeout"] = None
    if values.get("timeline") == "DYNAMIC":
        values["timeline"] = None
    return Config(**values)


HOROVOD_DIALECT = {"SPARK_HVD_DIALECT": "horovod"}
"""The environment of ranks whose world uses Horovod's dialect."""


def carried_dialect() -> dict[str, str]:
    """Return the variable that gives a run's ranks this process's dialect; empty for our own dialect."""
    if dialect := os.environ.get("SPARK_HVD_DIALECT", ""):
        return {"SPARK_HVD_DIALECT": dialect}
    return dict(HOROVOD_DIALECT) if "spark_hvd.horovod" in sys.modules else {}


def read_patience(*variables: str) -> float | None:
    """Return the seconds in the first of Horovod's variables that is set, such as "START_TIMEOUT"; None if none is.

    Raises:
        ValueError: The value is not a number.
    """
    for variable in variables:
        if text := os.environ.get(f"HOROVOD_{variable}", ""):
            return float(_setting(f"HOROVOD_{variable}", text, float))
    return None


def read_log_level() -> int | None:
    """Return Python's number for HOROVOD_LOG_LEVEL; None if it is not set.

    Raises:
        ValueError: The value is not one of Horovod's words.
    """
    text = os.environ.get("HOROVOD_LOG_LEVEL", "").lower()
    if not text:
        return None
    if text not in _LEVELS:
        raise ValueError(f"HOROVOD_LOG_LEVEL={text!r} in the environment: expected one of {', '.join(_LEVELS)}.")
    return _LEVELS[text]


def share_cores(threads: int) -> None:
    """Limit TensorFlow to this many threads, as torch is; call it before TensorFlow first computes.

    TensorFlow ignores OMP_NUM_THREADS, so each rank would take all cores. What the user has set stays. At least two
    threads run operations, because a collective waits in one.
    """
    os.environ.setdefault("TF_NUM_INTRAOP_THREADS", str(threads))
    os.environ.setdefault("TF_NUM_INTEROP_THREADS", str(max(2, threads)))


def read_threads() -> int | None:
    """Return the number in OMP_NUM_THREADS; None if there is none."""
    text = os.environ.get("OMP_NUM_THREADS", "")
    return int(text) if text.isdecimal() and int(text) > 0 else None


_LEVELS = {"trace": 5, "debug": 10, "info": 20, "warning": 30, "error": 40, "fatal": 50}


def _truth(text: str) -> bool:
    return text.lower() not in ("", "0", "false", "no", "off")


_SETTINGS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "FUSION_THRESHOLD": ("fusion_threshold", int),
    "CACHE_CAPACITY": ("cache_capacity", int),
    "HIERARCHICAL_ALLREDUCE": ("hierarchical_allreduce", _truth),
    "STALL_CHECK_TIME_SECONDS": ("stall_warning", float),
    "STALL_SHUTDOWN_TIME_SECONDS": ("stall_timeout", float),
    "TIMELINE": ("timeline", str),
    "TIMELINE_MARK_CYCLES": ("timeline_mark_cycles", _truth),
    "AUTOTUNE": ("autotune", _truth),
    "AUTOTUNE_LOG": ("autotune_log", str),
    "AUTOTUNE_WARMUP_SAMPLES": ("autotune_warmup_samples", int),
    "AUTOTUNE_STEPS_PER_SAMPLE": ("autotune_steps_per_sample", int),
    "AUTOTUNE_BAYES_OPT_MAX_SAMPLES": ("autotune_max_samples", int),
}


def _setting(variable: str, text: str, kind: Callable[[str], Any]) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{variable}={text!r} in the environment is not a number; unset it or set a number.") from None


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
