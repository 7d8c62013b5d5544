"""What runs in each Spark task of an elastic run: finds out where it is, reaches the driver, and is an agent."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import psutil

from spark_hvd.runner.channel.address import choose_address, is_loopback, own_addresses
from spark_hvd.runner.channel.frames import NOTICES
from spark_hvd.runner.channel.link import Link
from spark_hvd.runner.elastic.agent import Agent, AgentReport, GivenUpError
from spark_hvd.runner.outcome.rows import Packed
from spark_hvd.runner.rank.gpus import devices_of
from spark_hvd.runner.supervise.processes import fork_server
from spark_hvd.runner.supervise.supervised import RankJob
from spark_hvd.runner.supervise.task import TaskSpec, executor_pid, host_of, to_batches
from spark_hvd.world.layout import RankInfo

if TYPE_CHECKING:
    import pyarrow

_CONNECT_WAIT = 20.0
_NEXT_AGENT = 1 << 40
"""Added to the number of a task's attempt for each further agent of it; above all numbers that Spark gives."""


class DriverUnreachableError(RuntimeError):
    """This task cannot connect to the driver, where an elastic run is decided."""


@dataclass(frozen=True, slots=True)
class ElasticSpec:
    """What the driver tells every task of an elastic run.

    Attributes:
        task: What it has in common with a static run.
        rejoin_timeout: Seconds for a rank to join a generation.
        value_limit: What the pickled value of a rank may take, in bytes; None for no limit.
        restarts_tasks: Whether tasks that fail are started anew. In local mode Spark ends their job.
    """

    task: TaskSpec
    rejoin_timeout: float
    value_limit: int | None = None
    restarts_tasks: bool = True


def run_elastic_task(spec: ElasticSpec, payload: bytes) -> Iterator[pyarrow.RecordBatch]:
    """Be an agent, and yield its report as record batches of the result schema."""
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    gpus = context.resources().get("gpu")
    assert spec.task.hub is not None
    anchor = executor_pid()
    executor, host = executor_of(anchor)
    if not spec.restarts_tasks:
        executor = "driver"
    host = host or (socket.gethostname() if spec.restarts_tasks else spec.task.hub.host)
    report = run_agent(
        spec,
        payload,
        number=context.taskAttemptId(),
        task=context.partitionId(),
        host=host,
        executor=executor,
        anchor=anchor,
        gpus=None if gpus is None else list(gpus.addresses),
    )
    yield from to_batches([Packed(context.partitionId(), True, pickle.dumps(report))], spec.task.spool)


def run_agent(
    spec: ElasticSpec,
    payload: bytes,
    *,
    number: int,
    task: int,
    host: str,
    executor: str,
    anchor: int,
    gpus: list[str] | None,
) -> AgentReport:
    """Be an agent until the driver has no more use for it; then another, where nobody would start the task anew.

    ``number`` is the first agent's, which no other has; fork servers end with ``anchor``. ``gpus`` are those that Spark
    assigned; None: it assigns none. ``executor`` is Spark's name of the executor, empty where there is none.

    Raises:
        DriverUnreachableError: the driver cannot be reached.
        GivenUpError: Spark is to start the task elsewhere, as it does.
        NoAddressError, GpuError: the host's network or GPUs are not what the run was asked for.
    """
    common, config = spec.task, spec.task.config
    assert common.hub is not None
    alone = is_loopback(common.hub.host)  # who reaches the driver there is on its machine
    address = choose_address(host, config.interfaces, common.hub.host, alone=alone, own=own_addresses())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    own = devices_of(gpus, 1, 0, visible, config.gpus_per_proc)

    def job(place: RankInfo, slot: int, worker: int) -> RankJob:
        return common.job(place, address, own, payload, join_timeout=spec.rejoin_timeout, slot=slot, stream=worker)

    while True:
        fork_server(config.env, anchor)  # starts to import torch while we meet the driver
        try:
            with closing(Link(common.hub, number, host)) as link:
                if not link.wait_connected(_CONNECT_WAIT):
                    link.close(discard=True)
                    raise DriverUnreachableError(
                        f"SPARK_HVD_UNREACHABLE: host {host} cannot reach the driver at {common.hub.host}:"
                        f"{common.hub.port}, where elastic runs are decided. Set spark.driver.host to an address of "
                        "the driver that executors reach (a client of Spark Connect has to run where they reach it), "
                        "open its ports (ports=), or use spark_hvd.run, which needs no such connection.:END"
                    )
                link.hello(number, task=task)
                agent = Agent(link, partial(fork_server, config.env, anchor), job, spec.value_limit, executor)
                with _notices(agent):
                    return agent.run()
        except GivenUpError:
            if spec.restarts_tasks:
                raise
            number += _NEXT_AGENT


@contextmanager
def _notices(agent: Agent) -> Iterator[None]:
    """Take signals which say that this machine will go, where they can be taken."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = {signum: signal.signal(signum, agent.notice) for signum in NOTICES}
    try:
        yield
    finally:
        for signum, handler in former.items():
            signal.signal(signum, handler)


def executor_of(anchor: int) -> tuple[str, str]:
    """This task's executor as Spark knows it. Only barrier tasks are told; it stands in the JVM's command.

    ``anchor`` is the executor's JVM.

    Returns:
        Its name and its host; each is empty where the command does not tell, as in local mode.
    """
    given = dict(pairwise(psutil.Process(anchor).cmdline()))
    return given.get("--executor-id", ""), host_of(given.get("--hostname", ""))
