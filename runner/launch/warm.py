"""``warm_up``: prepares executors, so that the first run of a session starts fast."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spark_hvd.runner.config import PRELOAD
from spark_hvd.runner.launch.run import run
from spark_hvd.runner.supervise.processes import outlives_runs
from spark_hvd.world.words import count

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True, slots=True)
class WarmUp:
    """The result of :func:`spark_hvd.warm_up`.

    Attributes:
        executors: Number of executors that now have a process with torch loaded.
        hosts: Number of their hosts.
        ranks: Number of ranks that were started and have ended.
        seconds: Duration of the call.
    """

    __module__ = "spark_hvd.runner"

    executors: int
    hosts: int
    ranks: int
    seconds: float

    def __str__(self) -> str:
        warm = "is" if self.executors == 1 else "are"
        return (
            f"{count(self.executors, 'executor')} on {count(self.hosts, 'host')} {warm} warm: "
            f"{count(self.ranks, 'rank')} had started, met and ended after {self.seconds:.1f} s"
        )


def warm_up(
    spark: SparkSession | None = None,
    num_proc: int | None = None,
    *,
    env: Mapping[str, str | None] | None = None,
    start_timeout: float = 600.0,
) -> WarmUp:
    """Let executors start Python and import torch now, so that the first run or fit of a session need not wait.

    It runs an empty function on ranks, as :func:`spark_hvd.run` would. Each executor then keeps a process with torch
    until ten minutes after the last run; the process ends with the executor. A second call takes a fraction of a
    second. A notebook may call it in a thread while it reads data.

    Args:
        spark: The session; None for the active one.
        num_proc: Number of ranks. None for the number of task slots in the cluster, which reaches every executor;
            fewer ranks reach only the executors on which Spark places them.
        env: The ``env`` of later runs, if it has SPARK_HVD_PRELOAD, the modules to import besides torch.
        start_timeout: Seconds for everything, including waiting for busy slots.

    Returns:
        The number of warm executors, hosts and ranks, and the time it took.

    Raises:
        ValueError: ``env`` has a variable that libraries read when they load, such as OMP_NUM_THREADS. Runs with such
            a variable use their own process, which ends with them.
        ClusterError, StartTimeoutError, RankFailedError, ExecutorLostError: As raised by :func:`spark_hvd.run`. The
            text names what is missing on an executor, such as torch.
    """
    if not outlives_runs(env or {}):
        raise ValueError(
            f"env={dict(env or {})!r}: a run with variables that libraries read when they load uses its own process, "
            f"which cannot be warmed up; expected only {PRELOAD}. Leave env out, or skip the warm-up"
        )
    began = time.monotonic()

    def nothing() -> tuple[str, int]:
        import os
        import socket

        return socket.gethostname(), os.getppid()  # the parent is the fork server, one per executor

    nothing.__name__ = nothing.__qualname__ = "warm_up"
    servers = run(nothing, (), None, num_proc, spark=spark, env=env, start_timeout=start_timeout, verbose=0)
    return WarmUp(
        len(set(servers)), len({host for host, _ in servers}), len(servers), round(time.monotonic() - began, 3)
    )
