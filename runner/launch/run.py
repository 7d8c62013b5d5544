"""``run``: a function on every rank of a Spark barrier stage, its values back in rank order."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from spark_hvd.runner.config import RunConfig
from spark_hvd.runner.launch.attempt import Attempt
from spark_hvd.runner.launch.monitor import make_monitor
from spark_hvd.runner.launch.restart import check_least, tasks_again, with_restarts
from spark_hvd.runner.launch.result import RunResult
from spark_hvd.runner.outcome.errors import RunError
from spark_hvd.runner.outcome.payload import dump_call, name_of
from spark_hvd.runner.spark import session as on_spark
from spark_hvd.runner.spark.profiles import Ask, TaskResources, task_resources
from spark_hvd.runner.spark.slots import wait_for_slots
from spark_hvd.runner.tracebacks import briefly
from spark_hvd.runner.watch.tracking import Tracker

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

R = TypeVar("R")


@briefly
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
    progress: str = "auto",
    cpus_per_proc: int | None = None,
    gpus_per_proc: int | None = None,
    max_restarts: int = 0,
    min_num_proc: int | None = None,
    tracker: Tracker | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
) -> RunResult[R]:
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
        timeout: Seconds that fn may run in one start, or None for no limit. When over, every rank's stacks are in the
            error.
        collective_timeout: Seconds after which a collective fails that not all ranks have joined.
        verbose: 0 shows nothing, 1 what ranks print, each line with ``[rank]`` before it, and how far they are.
        progress: How the run is shown while it goes on: "table" on a terminal, "notebook", "plain" lines every 30
            seconds, "json" lines, or "off"; "auto" takes what suits. See docs/progress.md.
        cpus_per_proc: Cores for each rank, which is also its OMP_NUM_THREADS; None for what the application gives.
        gpus_per_proc: GPUs for each rank, 0 to hide them; None for what the application gives.
        max_restarts: How often all ranks are started again after an executor was lost, or a rank was killed by a
            signal. fn then runs from its start, on every rank, and is to go on from a checkpoint (hvd.checkpoint). 0:
            fn never runs twice.
        min_num_proc: Ranks that are enough for a restart where the slots for num_proc do not come back within
            start_timeout; None for num_proc.
        tracker: Keeps a record of the run elsewhere: ``spark_hvd.runner.MlflowTracker()``, or one of yours. See
            docs/tracking.md.
        stdout: Text stream for the ranks' stdout instead of ``sys.stdout``.
        stderr: Text stream for the ranks' stderr instead of ``sys.stderr``.

    Returns:
        What fn returned on every rank, in rank order: a list, that also knows how the run went.

    Raises:
        ValueError, TypeError: an argument is wrong; nothing was started.
        UnpicklableError: fn or an argument cannot be pickled; the message names the part. Nothing was started.
        ClusterError: the application cannot run this (no session, too few slots, cores or GPUs, dynamic allocation,
            something missing on an executor).
        StartTimeoutError: not all ranks came up in ``start_timeout``.
        RankFailedError: a rank raised, exited or was killed; has its traceback, host and last output.
        RunTimeoutError: ``timeout`` was over.
        ExecutorLostError: Spark lost an executor, and no restart was left.
        HubError: the hub between ranks and driver has failed.
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
        progress=progress,
        cpus_per_proc=cpus_per_proc,
        gpus_per_proc=gpus_per_proc,
        max_restarts=max_restarts,
        min_num_proc=min_num_proc,
    )
    payload = dump_call(fn, args, kwargs or {})
    session = on_spark.active_session(spark)
    on_spark.check_barrier_possible(session)
    tasks, resources = tasks_of(session, config)
    check_least(config, tasks)
    name, run_id = name_of(fn), f"spark_hvd-{uuid.uuid4().hex[:12]}"
    with make_monitor(config, name, tasks * config.procs_per_task, stdout, stderr, tracker) as monitor:
        attempt = Attempt(session, config, payload, name, run_id, resources, monitor)

        def start(generation: int, lost: RunError | None) -> list[R]:
            there = tasks if lost is None else tasks_again(session, config, resources, tasks, lost)
            return attempt.run(there, generation)

        return monitor.result(with_restarts(start, config.max_restarts))


def tasks_of(session: SparkSession, config: RunConfig) -> tuple[int, TaskResources]:
    """How many tasks a run has, once there is room for all of them, and what each of them gets.

    Raises:
        ClusterError: the application cannot give that; NotEnoughSlotsError where it is the number.
    """
    ask = Ask(config.cpus_per_proc, config.gpus_per_proc, config.procs_per_task)
    resources = task_resources(session, ask)
    return wait_for_slots(session, config.num_tasks, config.start_timeout, resources), resources
