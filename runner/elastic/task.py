"""The task of an elastic run: finds out where it is, connects to the driver, and runs an agent."""

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
from spark_hvd.runner.outcome.rows import PickledOutcome
from spark_hvd.runner.rank.gpus import devices_of
from spark_hvd.runner.supervise.processes import fork_server
from spark_hvd.runner.supervise.supervised import RankJob
from spark_hvd.runner.supervise.task import TaskSpec, executor_pid, host_of, to_batches
from spark_hvd.world.layout import RankInfo

if TYPE_CHECKING:
    import pyarrow

_CONNECT_WAIT = 20.0
_NEXT_AGENT = 1 << 40
"""Added to a task attempt's number for each further agent of the task; larger than any number that Spark assigns."""


class DriverUnreachableError(RuntimeError):
    """This task cannot connect to the driver, which controls an elastic run."""


@dataclass(frozen=True, slots=True)
class ElasticSpec:
    """The settings that every task of an elastic run gets from the driver.

    Attributes:
        task: The settings that static runs have, too.
        rejoin_timeout: Seconds for a rank to join a generation.
        value_limit: Maximum size of a rank's pickled value, in bytes; None means no limit.
        restarts_tasks: Whether Spark restarts failed tasks. In local mode, it ends the job instead.
    """

    task: TaskSpec
    rejoin_timeout: float
    value_limit: int | None = None
    restarts_tasks: bool = True


def run_elastic_task(spec: ElasticSpec, payload: bytes) -> Iterator[pyarrow.RecordBatch]:
    """Run an agent, and yield its report as record batches of the result schema."""
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
    yield from to_batches([PickledOutcome(context.partitionId(), True, pickle.dumps(report))], spec.task.spool)


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
    """Run an agent until the driver no longer needs it.

    If the driver gives the agent up and Spark would not restart the task, this runs another one. ``number`` is the
    first agent's number, which is unique. Fork servers end with the process ``anchor``. ``gpus`` are the GPUs that
    Spark assigned; None if it assigns none. ``executor`` is Spark's ID of the executor, empty if there is none.

    Raises:
        DriverUnreachableError: The driver cannot be reached.
        GivenUpError: Spark should start the task elsewhere, and will.
        NoAddressError, GpuError: The host's network or GPUs do not match what the run asked for.
    """
    common, config = spec.task, spec.task.config
    assert common.hub is not None
    alone = is_loopback(common.hub.host)  # the driver is on this machine
    address = choose_address(host, config.interfaces, common.hub.host, alone=alone, own=own_addresses())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    own = devices_of(gpus, 1, 0, visible, config.gpus_per_proc)

    def job(place: RankInfo, slot: int, worker: int) -> RankJob:
        return common.job(place, address, own, payload, join_timeout=spec.rejoin_timeout, slot=slot, stream=worker)

    while True:
        # It imports torch while we connect to the driver, and stays open between workers because we refer to it.
        _server = fork_server(config.env, anchor)
        try:
            with closing(Link(common.hub, number, host)) as link:
                if not link.wait_connected(_CONNECT_WAIT):
                    link.close(discard=True)
                    raise DriverUnreachableError(
                        f"SPARK_HVD_UNREACHABLE: host {host} cannot reach the driver at {common.hub.host}:"
                        f"{common.hub.port}, which controls an elastic run. Set spark.driver.host to an address of the "
                        "driver that executors can reach (a Spark Connect client must run where they can reach it), "
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
    """Let the agent handle signals that announce the end of this machine; only the main thread can do so."""
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
    """Return the ID and the host of this task's executor, read from the command line of its JVM, ``anchor``.

    Spark tells only barrier tasks. Each text is empty if the command does not contain it, as in local mode.
    """
    options = dict(pairwise(psutil.Process(anchor).cmdline()))
    return options.get("--executor-id", ""), host_of(options.get("--hostname", ""))
