"""Small functions that programs take from ``horovod.common.util`` and its neighbours."""

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
"""Horovod's release whose names these are; programs compare it."""


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether a number of ranks is a power of 2. Adasum does not need it here."""
    return num_rank > 0 and num_rank.bit_count() == 1


def split_list(items: Sequence[T], parts: int) -> list[Sequence[T]]:
    """``items`` in their order in ``parts`` pieces, whose lengths differ by one at most."""
    least, more = divmod(len(items), parts)
    ends = [part * least + min(part, more) for part in range(parts + 1)]
    return [items[start:end] for start, end in itertools.pairwise(ends)]


def to_list(value: Any, length: int) -> list[Any] | None:
    """``value`` as a list of ``length``: one value is repeated, None stays None.

    Raises:
        ValueError: it is a list of another length.
    """
    if value is None:
        return None
    values = value if isinstance(value, list) else [value]
    if len(values) not in (1, length):
        raise ValueError(f"{values}: expected 1 or {length} values, got {len(values)}")
    return values * length if len(values) == 1 else values


def is_iterable(value: object) -> bool:
    """Whether ``iter(value)`` works."""
    try:
        iter(value)  # type: ignore[call-overload]
    except TypeError:
        return False
    return True


def is_version_greater_equal_than(version: str, target: str) -> bool:
    """Whether a version is ``target``, which has three parts, or a later one.

    Raises:
        ValueError: one is no text, or ``target`` has not three parts.
    """
    from packaging.version import parse

    if not isinstance(version, str) or not isinstance(target, str) or target.count(".") != 2:
        raise ValueError(f"version={version!r}, target={target!r}: expected texts, such as '2.4.1'; of three parts")
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
    """Whether ``framework`` ("torch", "tensorflow", "mxnet") is installed: nothing is compiled for it here."""
    return importlib.util.find_spec(framework) is not None


def check_extension(name: str, *_: Any) -> None:
    """Nothing is compiled: import the framework of ``name``, "horovod.torch".

    Raises:
        ImportError: it is not installed.
    """
    importlib.import_module(name.rpartition(".")[2])


def gpu_available(framework: str, verbose: bool = False) -> bool:
    """Whether torch sees a GPU."""
    import torch

    return torch.cuda.is_available()


def get_available_devices() -> list[str]:
    """The GPUs of this rank as it numbers them; Horovod's are Spark's numbers, and more than one rank's."""
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]


def spark_backend(num_proc: int | None = None, **options: Any) -> Any:
    """``horovod.spark.common.backend.SparkBackend``: ours, with the arguments of ``horovod.spark.run``."""
    ours = importlib.import_module("spark_hvd.estimators.fit.backend").SparkBackend
    return ours(num_proc, **importlib.import_module("spark_hvd.runner.compat.horovod").options_of_run(**options))


def host_hash(salt: object = None) -> str:
    """Tells hosts, and YARN's containers on one, apart."""
    parts = [socket.gethostname(), *([str(salt)] if salt else []), os.environ.get("CONTAINER_ID", "")]
    return "-".join(part for part in parts if part)


def _built(name: str) -> Callable[..., Any]:
    def built(verbose: bool = False) -> Any:
        from spark_hvd.context import who

        return getattr(who, name)()

    built.__name__ = built.__qualname__ = name
    return built


mpi_built, gloo_built, nccl_built = _built("mpi_built"), _built("gloo_built"), _built("nccl_built")
ddl_built, ccl_built = _built("ddl_built"), _built("ccl_built")
cuda_built, rocm_built = _built("cuda_built"), _built("rocm_built")
