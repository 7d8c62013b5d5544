"""Small functions that programs import from ``horovod.common.util`` and its neighbours."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")

VERSION = "0.28.1"
"""The release of Horovod that has these names; programs compare it."""


def num_rank_is_power_2(num_rank: int) -> bool:
    """Return whether a number of ranks is a power of 2. Our Adasum does not need one."""
    return num_rank > 0 and num_rank.bit_count() == 1


def split_list(items: Sequence[T], parts: int) -> list[Sequence[T]]:
    """Divide ``items`` into ``parts`` pieces in order, whose lengths differ by at most one."""
    least, more = divmod(len(items), parts)
    ends = [part * least + min(part, more) for part in range(parts + 1)]
    return [items[start:end] for start, end in itertools.pairwise(ends)]


def to_list(value: Any, length: int) -> list[Any] | None:
    """Return ``value`` as a list of ``length`` items: one value is repeated, None stays None.

    Raises:
        ValueError: ``value`` is a list of another length.
    """
    if value is None:
        return None
    values = value if isinstance(value, list) else [value]
    if len(values) not in (1, length):
        raise ValueError(f"{values}: expected 1 or {length} values, got {len(values)}")
    return values * length if len(values) == 1 else values


def is_iterable(value: object) -> bool:
    """Return whether ``iter(value)`` works."""
    try:
        iter(value)  # type: ignore[call-overload]
    except TypeError:
        return False
    return True


def is_version_greater_equal_than(version: str, target: str) -> bool:
    """Return whether a version is at least ``target``, which has three parts.

    Raises:
        ValueError: An argument is not text, or ``target`` does not have three parts.
    """
    from packaging.version import parse

    if not isinstance(version, str) or not isinstance(target, str) or target.count(".") != 2:
        raise ValueError(f"version={version!r}, target={target!r}: expected texts with three parts, such as '2.4.1'")
    return bool(parse(version) >= parse(target))


@contextmanager
def env(**variables: str | None) -> Iterator[None]:
    """Set environment variables, or unset those that are None, within a block."""
    before = {name: os.environ.pop(name, None) for name in variables}
    os.environ.update({name: value for name, value in variables.items() if value is not None})
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def extension_available(framework: str, verbose: bool = False) -> bool:
    """Return whether ``framework`` ("torch", "tensorflow", "mxnet") is installed; nothing is compiled for it here."""
    return importlib.util.find_spec(framework) is not None


def check_extension(name: str, *_: Any) -> None:
    """Import the framework of ``name``, such as "horovod.torch"; nothing is compiled here.

    Raises:
        ImportError: The framework is not installed.
    """
    importlib.import_module(name.rpartition(".")[2])


def gpu_available(framework: str, verbose: bool = False) -> bool:
    """Return whether torch sees a GPU."""
    import torch

    return torch.cuda.is_available()


def get_available_devices() -> list[str]:
    """Return this rank's GPUs by its own numbers; Horovod returns Spark's numbers, for more than one rank."""
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]


def spark_backend(num_proc: int | None = None, **options: Any) -> Any:
    """Return our backend for ``horovod.spark.common.backend.SparkBackend``, with ``horovod.spark.run``'s arguments."""
    ours = importlib.import_module("spark_hvd.estimators.fit.backend").SparkBackend
    return ours(num_proc, **importlib.import_module("spark_hvd.runner.compat.horovod").options_of_run(**options))


def host_hash(salt: object = None) -> str:
    """Return a name that distinguishes hosts, and YARN containers on one host."""
    parts = [socket.gethostname(), *([str(salt)] if salt else []), os.environ.get("CONTAINER_ID", "")]
    return "-".join(part for part in parts if part)


def _built(name: str) -> Callable[..., Any]:
    def built(verbose: bool = False) -> Any:
        from spark_hvd.context import basics

        return getattr(basics, name)()

    built.__name__ = built.__qualname__ = name
    return built


mpi_built, gloo_built, nccl_built = _built("mpi_built"), _built("gloo_built"), _built("nccl_built")
ddl_built, ccl_built = _built("ddl_built"), _built("ccl_built")
cuda_built, rocm_built = _built("cuda_built"), _built("rocm_built")
