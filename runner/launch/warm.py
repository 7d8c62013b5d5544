"""``warm_up``: what the first run of a session would wait for is done before, at a time of the user's choice."""

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
    """What :func:`spark_hvd.warm_up` has done.

    Attributes:
        executors: Whose processes have torch loaded now, or had it before.
        hosts: On which these are.
        ranks: That were started, and have ended.
        seconds: From the call to its return.
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
    """Let executors start Python and import torch now, so that the first run or fit of a session does not wait for it.

    It runs a function that does nothing on ranks, as :func:`spark_hvd.run` would. The process with torch that each
    executor then has is kept for ten minutes after the last run, and ends with the executor. Called again, it is
    done in a fraction of a second. A notebook may call it in a thread while data are read.

    Args:
        spark: The session; None for the active one.
        num_proc: Number of ranks. None for as many as the cluster has task slots, which reaches every executor; fewer
            reach those on which Spark places them.
        env: That of the runs to come, where it has SPARK_HVD_PRELOAD: modules to be imported besides torch.
        start_timeout: Seconds for all of this: includes waiting for busy slots.

    Returns:
        How many executors are warm.

    Raises:
        ValueError: ``env`` has a variable that libraries read when they are loaded, such as OMP_NUM_THREADS: runs with
            one have a process of their own, that ends with them.
        ClusterError, StartTimeoutError, RankFailedError, ExecutorLostError: as :func:`spark_hvd.run` raises them; what
            is missing on an executor, such as torch, is named.
    """
    if not outlives_runs(env or {}):
        raise ValueError(
            f"env={dict(env or {})!r}: a run with variables that libraries read when they are loaded has a process "
            f"of its own, that cannot be warmed up before; expected {PRELOAD} alone. Leave env out, or let the first "
            "run take its time"
        )
    began = time.monotonic()

    def nothing() -> tuple[str, int]:
        import os
        import socket

        return socket.gethostname(), os.getppid()  # the process that ranks are forked from: one an executor

    nothing.__name__ = nothing.__qualname__ = "warm_up"
    servers = run(nothing, (), None, num_proc, spark=spark, env=env, start_timeout=start_timeout, verbose=0)
    return WarmUp(
        len(set(servers)), len({host for host, _ in servers}), len(servers), round(time.monotonic() - began, 3)
    )
