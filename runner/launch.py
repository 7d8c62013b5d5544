"""``run``: a function on every rank of a Spark barrier stage, its values back in rank order."""

from __future__ import annotations

import logging
import pickle
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import zmq

from spark_hvd.ports import PortRange
from spark_hvd.runner import spark as on_spark
from spark_hvd.runner.collect import results
from spark_hvd.runner.config import RunConfig
from spark_hvd.runner.errors import RunError, StartTimeoutError
from spark_hvd.runner.hub import Hub
from spark_hvd.runner.hub_state import HubState
from spark_hvd.runner.outcome import from_rows
from spark_hvd.runner.output import Printer
from spark_hvd.runner.payload import dump_call
from spark_hvd.runner.profiles import Ask, TaskResources, task_resources
from spark_hvd.runner.reach import Reach
from spark_hvd.runner.spark_errors import silent, translate
from spark_hvd.runner.task import TaskSpec

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

R = TypeVar("R")
_log = logging.getLogger(__name__)
_STOP_GRACE = 4.0
"""Seconds that ranks get to end after a stop before Spark is asked to kill the tasks."""


def run(
    fn: Callable[..., R],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    *,
    spark: SparkSession | None = None,
    backend: str | None = None,
    mpi: str | None = None,
    procs_per_task: int = 1,
    interfaces: Sequence[str] = (),
    ports: str | None = None,
    env: Mapping[str, str | None] | None = None,
    start_timeout: float = 600.0,
    timeout: float | None = None,
    collective_timeout: float = 1800.0,
    verbose: int = 1,
    cpus_per_proc: int | None = None,
    gpus_per_proc: int | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
) -> list[R]:
    """Run ``fn(*args, **kwargs)`` on ``num_proc`` ranks of the Spark cluster, all at the same time.

    Each rank is a process of its own, a child of a task of one barrier stage. When fn starts, the ranks have already
    met: ``import spark_hvd.torch as hvd`` works at once, and so does ``torch.distributed``, whose default process
    group is initialised. Ranks on the same host are numbered next to each other.

    fn, its arguments and its values are pickled by cloudpickle; functions and classes defined in a notebook or script
    travel by value.

    Args:
        fn: The training function.
        args: Positional arguments of fn.
        kwargs: Keyword arguments of fn.
        num_proc: Number of ranks; None for as many as the cluster has task slots.
        spark: The session; None for the active one.
        backend: "gloo", "nccl", "mpi", or None for NCCL on CUDA tensors and Gloo on CPU tensors.
        mpi: Which MPI, for ``backend="mpi"``: "mpich" (the default) or "openmpi".
        procs_per_task: Ranks in each Spark task; ``num_proc`` must be a multiple of it.
        interfaces: Interfaces ("eth1") or networks ("10.0.0.0/8") over which ranks are to talk; each host takes the
            first that it has. By default, what carries the address by which Spark knows the host.
        ports: Where this program and the ranks may listen, as "30000-30100"; by default anywhere. Gloo and NCCL choose
            theirs from the kernel's range all the same (sysctl net.ipv4.ip_local_port_range).
        env: Changes to the environment of the ranks; None as a value unsets a variable.
        start_timeout: Seconds for all ranks to be up: includes waiting for busy slots and importing torch.
        timeout: Seconds that fn may run, or None for no limit. When over, every rank's stacks are in the error.
        collective_timeout: Seconds after which a collective fails that not all ranks have joined.
        verbose: 0 shows nothing, 1 what ranks print, each line with ``[rank]`` before it.
        cpus_per_proc: Cores for each rank, which is also its OMP_NUM_THREADS; None for what the application gives.
        gpus_per_proc: GPUs for each rank, 0 to hide them; None for what the application gives.
        stdout: Text stream for the ranks' stdout instead of ``sys.stdout``.
        stderr: Text stream for the ranks' stderr instead of ``sys.stderr``.

    Returns:
        What fn returned on every rank, in rank order.

    Raises:
        ValueError, TypeError: an argument is wrong; nothing was started.
        UnpicklableError: fn or an argument cannot be pickled; the message names the part. Nothing was started.
        ClusterError: the application cannot run this (no session, too few slots, cores or GPUs, dynamic allocation,
            something missing on an executor).
        StartTimeoutError: not all ranks came up in ``start_timeout``.
        RankFailedError: a rank raised, exited or was killed; has its traceback, host and last output.
        RunTimeoutError: ``timeout`` was over.
        ExecutorLostError: Spark lost an executor. fn is not started again.
        KeyboardInterrupt: after every rank has been stopped.
    """
    config = RunConfig(
        num_proc=num_proc,
        backend=backend,
        mpi=mpi,
        procs_per_task=procs_per_task,
        interfaces=interfaces,
        ports=ports,
        env=dict(env or {}),
        start_timeout=start_timeout,
        timeout=timeout,
        collective_timeout=collective_timeout,
        verbose=verbose,
        cpus_per_proc=cpus_per_proc,
        gpus_per_proc=gpus_per_proc,
    )
    payload = dump_call(fn, args, kwargs or {})
    session = on_spark.active_session(spark)
    on_spark.check_barrier_possible(session)
    tasks, resources = tasks_of(session, config)
    size = tasks * config.procs_per_task
    printer = make_printer(config, stdout, stderr)
    name: str = getattr(fn, "__qualname__", type(fn).__qualname__)
    run_id = f"spark_hvd-{uuid.uuid4().hex[:12]}"
    with ExitStack() as closing:
        local = on_spark.is_local(session)
        hub = _open_hub(session, size, config, printer, None if local else on_spark.max_result_bytes(session))
        if hub is not None:
            closing.callback(hub.close)
        spool = closing.enter_context(on_spark.temporary_directory(session)) if local else None
        spec = TaskSpec.of(
            config,
            run_id,
            None if hub is None else hub.address,
            spool,
            may_share_gpus=resources.plan.may_share,
        )
        job = on_spark.TaskJob(
            session,
            tasks,
            task_of("task", "run_task", pickle.dumps(spec), payload),
            f"spark_hvd.run({name}) on {size} ranks",
            run_id,
            resources.profile,
        )
        _attend(job, hub, size, config, printer)
        printer.flush()
        if job.error is not None:
            if hub is not None:  # Spark kills the other tasks in its own time; ours are told now
                hub.stop("lost")
                hub.wait_gone(_STOP_GRACE / 2)
            lost = None if hub is None else hub.lost
            raise (silent(lost) if lost else translate(job.error, size, job.placement())) from job.error
        order = [] if hub is None else hub.snapshot()[1]
        return results(from_rows(job.rows), size, order, config.timeout)


def tasks_of(session: SparkSession, config: RunConfig) -> tuple[int, TaskResources]:
    """How many tasks a run has, once there is room for all of them, and what each of them gets.

    Raises:
        ClusterError: the application cannot give that; NotEnoughSlotsError where it is the number.
    """
    ask = Ask(config.cpus_per_proc, config.gpus_per_proc, config.procs_per_task)
    resources = task_resources(session, ask)
    return on_spark.wait_for_slots(session, config.num_tasks, config.start_timeout, resources), resources


def make_printer(config: RunConfig, stdout: TextIO | None, stderr: TextIO | None) -> Printer:
    """Where the ranks' output goes: to the streams given, else to this program's unless ``verbose`` is 0."""
    quiet = config.verbose < 1
    return Printer(stdout or (None if quiet else sys.stdout), stderr or (None if quiet else sys.stderr))


def task_of(module: str, function: str, spec: bytes, payload: bytes) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """A Spark task, as a nested function: such travel by value, so it starts even where spark_hvd is not installed.

    Args:
        module: Of the runner.
        function: In it, called with the unpickled `spec` and `payload`; yields record batches.
        spec: Pickled.
        payload: The pickled call.
    """

    def spark_hvd_task(batches: Iterator[Any]) -> Iterator[Any]:
        import importlib
        import pickle
        import platform
        import socket
        import sys

        for _ in batches:
            pass
        try:
            work = getattr(importlib.import_module(f"spark_hvd.runner.{module}"), function)
        except ImportError as error:
            raise ImportError(
                f"SPARK_HVD_SETUP: {type(error).__name__}: {error}; Python {platform.python_version()} "
                f"({sys.executable}) on host {socket.gethostname()} cannot import spark_hvd.:END"
            ) from None
        yield from work(pickle.loads(spec), payload)

    return spark_hvd_task


def _open_hub(
    session: SparkSession, size: int, config: RunConfig, printer: Printer, max_result_bytes: int | None
) -> Hub | None:
    if on_spark.is_connect(session):
        _log.info("Spark Connect: ranks meet at rank 0; their output stays in the executors' logs")
        return None
    public, bind = on_spark.driver_hosts(session)
    state = HubState(size, timeout=config.timeout, may_fall_back=True, max_result_bytes=max_result_bytes)
    try:
        # ZeroMQ binds to addresses only, and the driver's host is often a name.
        address = str(socket.getaddrinfo(bind.strip("[]"), None, type=socket.SOCK_STREAM)[0][4][0])
        ports = None if config.ports is None else PortRange.parse(config.ports)
        # Spark writes IPv6 addresses in brackets.
        return Hub(state, address, public.strip("[]"), printer.put, ports)
    except (OSError, zmq.ZMQBaseError) as error:
        _log.warning(
            "the driver cannot listen on %s (%s): set spark.driver.bindAddress to an address of this machine. Training "
            "goes on, but the output of the ranks stays in the executors' logs",
            bind,
            error,
        )
        return None


def _attend(job: on_spark.TaskJob, hub: Hub | None, size: int, config: RunConfig, printer: Printer) -> None:
    """Stay with the job until it has ended: print, watch the start timeout, pass on Ctrl-C."""
    deadline = time.monotonic() + config.start_timeout
    warned = False
    reach = Reach(size, job.placement)
    try:
        while job.running:
            job.wait(0.02)
            printer.flush()
            if hub is None:
                continue
            if (lost := hub.lost) is not None:
                _end(job, hub, "lost")
                raise silent(lost)
            started = hub.snapshot()[0]
            if len(started) < size and (missing := reach.missing(started)) is not None:
                _end(job, hub, "lost")
                raise silent(missing)
            if hub.fell_back and not warned:
                warned = True
                _log.warning(
                    "ranks %s cannot reach the driver at %s:%d; training goes on, but their output stays in the "
                    "executors' logs",
                    sorted(set(range(size)) - started),
                    hub.address.host,
                    hub.address.port,
                )
            if len(started) < size and not hub.fell_back and time.monotonic() > deadline:
                absent = reach.absent(started)
                _end(job, hub, "start")
                raise StartTimeoutError(
                    f"{len(started)} of {size} ranks had started after start_timeout={config.start_timeout:g} s. "
                    f"{absent}All ranks start together, when enough task slots are free: wait for the jobs that hold "
                    "them, ask for fewer ranks, or give a larger start_timeout=."
                )
    except KeyboardInterrupt:
        _end(job, hub, "interrupt")
        printer.flush()
        raise
    except RunError:
        raise
    except BaseException:  # a stream that cannot be written to, for example
        _end(job, hub, "interrupt")
        raise


def _end(job: on_spark.TaskJob, hub: Hub | None, reason: str) -> None:
    """Stop the ranks, then, if that does not end the job, have Spark kill the tasks."""
    if hub is not None:
        hub.stop(reason)
        hub.wait_gone(_STOP_GRACE)
        job.wait(1)
    if job.running:
        job.cancel()
        job.wait(10)
