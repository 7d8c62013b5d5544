"""Horovod's launchers, implemented by ours: ``horovod.spark.run`` and ``run_elastic``, and ``horovod.run``."""

from __future__ import annotations

import socket
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from spark_hvd.runner.launch.arguments import folded
from spark_hvd.runner.launch.local import run_local
from spark_hvd.runner.launch.run import run
from spark_hvd.world.env import HOROVOD_DIALECT, read_patience

_PLACES = "Spark decides on which hosts ranks run: use horovod.spark.run. Without Spark, ranks run on this machine"
_OF_THIS_HOST = ("localhost", "127.0.0.1", "::1")


def run_on_spark(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    start_timeout: float | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    extra_mpi_args: str | None = None,
    env: Mapping[str, str | None] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    verbose: int = 1,
    nics: str | Sequence[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | None = None,
) -> list[Any]:
    """Do what ``horovod.spark.run`` does: :func:`spark_hvd.run` with Horovod's arguments, in its dialect.

    Returns:
        The return values of fn, in rank order.

    Raises:
        ValueError: An argument is not supported. The message says what to use instead.
        RunError: As raised by :func:`spark_hvd.run`.
    """
    _refuse(extra_mpi_args=(extra_mpi_args, "MPI is started without mpirun: set its variables by env="))
    _refuse(executable=(executable, "set PYSPARK_PYTHON"))
    more = _common(start_timeout, env, stdout, stderr, verbose, nics, prefix_output_with_timestamp)
    return run(fn, args, kwargs, num_proc, backend=_backend(use_mpi, use_gloo), **more)


def run_elastic_on_spark(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    start_timeout: float | None = None,
    elastic_timeout: float | None = None,
    reset_limit: int | None = None,
    env: Mapping[str, str | None] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    verbose: int = 1,
    nics: str | Sequence[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Do what ``horovod.spark.run_elastic`` does: :func:`spark_hvd.run_elastic` with Horovod's arguments and dialect.

    Returns:
        The return values of fn, in rank order.

    Raises:
        ValueError: An argument is wrong.
        RunError: As raised by :func:`spark_hvd.run_elastic`.
    """
    from spark_hvd.runner.elastic.run import run_elastic

    given = {
        "min_num_proc": min_num_proc if min_num_proc is not None else min_np,
        "max_num_proc": max_num_proc if max_num_proc is not None else max_np,
        "elastic_timeout": elastic_timeout if elastic_timeout is not None else read_patience("ELASTIC_TIMEOUT"),
        "reset_limit": reset_limit,
    }
    more = _common(start_timeout, env, stdout, stderr, verbose, nics, prefix_output_with_timestamp)
    return run_elastic(fn, args, kwargs, num_proc, **_without_none(given), **more)


def run_here(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: tuple[float, float] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: bool | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: str | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Do what ``horovod.run`` does, on this machine: :func:`spark_hvd.run_local` with Horovod's arguments and dialect.

    Returns:
        The return values of func, in rank order.

    Raises:
        ValueError: An argument is not supported, such as another host. The message says what to use instead.
        RunError: As raised by :func:`spark_hvd.run_local`.
    """
    ranks = num_proc if np is None else np
    check_hosts(hosts, ranks)
    for name, value in {"hostfile": hostfile, "host_discovery_script": host_discovery_script}.items():
        _refuse(**{name: (value, _PLACES)})
    _refuse(mpi_args=(mpi_args, "MPI is started without mpirun: set its variables in os.environ"))
    _refuse(executable=(executable, "ranks run in the Python of this program"))
    _refuse(output_filename=(output_filename, "every line begins with its rank: redirect this program's output"))
    least = min_np if min_num_proc is None else min_num_proc
    most = max_np if max_num_proc is None else max_num_proc
    more = _common(start_timeout, nics=network_interfaces or network_interface)
    if least is None and most is None and reset_limit is None:
        return run_local(func, args, kwargs, ranks, backend=_backend(use_mpi, use_gloo), **more)
    from spark_hvd.runner.elastic.local import run_elastic_local

    given = {"min_num_proc": least, "max_num_proc": most, "reset_limit": reset_limit, "cooldown_range": cooldown_range}
    return run_elastic_local(func, args, kwargs, ranks, **_without_none(given), **more)


def options_of_run(use_mpi: bool | None = None, use_gloo: bool | None = None, **more: Any) -> dict[str, Any]:
    """Translate arguments of ``horovod.spark.run``, which Horovod's SparkBackend also takes, into those of ours."""
    return {"backend": _backend(use_mpi, use_gloo), **_common(**more)}


def check_hosts(hosts: str | None, ranks: int | None) -> int:
    """Check that ``hosts``, such as "localhost:4", names this machine and has slots for so many ranks.

    Returns:
        The number of slots; 0 if no host is named.

    Raises:
        ValueError: Another host is named, or there are too few slots.
    """
    slots = 0
    for entry in (hosts or "").split(","):
        name, _, count = entry.strip().rpartition(":") if ":" in entry else (entry.strip(), "", "1")
        if not entry.strip():
            continue
        if name not in (*_OF_THIS_HOST, socket.gethostname(), socket.getfqdn()):
            raise ValueError(f"hosts={hosts!r}: {name} is not this machine. {_PLACES}.")
        if not count.isdecimal() or not int(count):
            raise ValueError(f"hosts={hosts!r}: expected a number of slots after the host, such as localhost:4")
        slots += int(count)
    if hosts and ranks is not None and ranks > slots:
        raise ValueError(f"hosts={hosts!r} with {ranks} ranks: expected {ranks} slots or more: localhost:{ranks}")
    return slots


def _common(
    start_timeout: float | None = None,
    env: Mapping[str, str | None] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    verbose: int = 1,
    nics: str | Sequence[str] | None = None,
    prefix_output_with_timestamp: bool = False,
) -> dict[str, Any]:
    if prefix_output_with_timestamp:
        warnings.warn("prefix_output_with_timestamp: lines begin with their rank and have no time", stacklevel=3)
    patience = start_timeout if start_timeout is not None else read_patience("SPARK_START_TIMEOUT", "START_TIMEOUT")
    interfaces = nics.split(",") if isinstance(nics, str) else [*(nics or ())]
    given = {"start_timeout": patience, "interfaces": interfaces or None, "stdout": stdout, "stderr": stderr}
    return {"env": {**HOROVOD_DIALECT, **(env or {})}, "verbose": min(int(verbose), 1), **folded(_without_none(given))}


def _backend(use_mpi: bool | None, use_gloo: bool | None) -> str | None:
    if use_mpi and use_gloo:
        raise ValueError("use_mpi=True, use_gloo=True: expected one of them")
    return "mpi" if use_mpi else "gloo" if use_gloo else None


def _refuse(**arguments: tuple[Any, str]) -> None:
    for name, (value, instead) in arguments.items():
        if value is not None:
            raise ValueError(f"{name}={value!r} is not supported: {instead}")


def _without_none(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None}
