"""``run_local``: ``run`` with plain processes on this machine, without Spark or Java."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, TypeVar

from spark_hvd.runner.channel.hub import Hub
from spark_hvd.runner.channel.link import Link
from spark_hvd.runner.channel.state import HubState
from spark_hvd.runner.config import CommonConfig, Network, Reporting, RunConfig
from spark_hvd.runner.launch.arguments import adapted, launcher
from spark_hvd.runner.launch.attend import Grace, ThreadJob, attend
from spark_hvd.runner.launch.data import run_data_of
from spark_hvd.runner.launch.monitor import Monitor, make_monitor
from spark_hvd.runner.launch.restart import with_restarts
from spark_hvd.runner.launch.result import RunResult
from spark_hvd.runner.outcome.collect import results
from spark_hvd.runner.outcome.errors import RunError
from spark_hvd.runner.outcome.payload import dump_call
from spark_hvd.runner.outcome.rows import PickledOutcome
from spark_hvd.runner.supervise.processes import check_system, fork_server
from spark_hvd.runner.supervise.task import TaskSpec, run_ranks
from spark_hvd.runner.supervise.team import RefusedError, meet
from spark_hvd.runner.tracebacks import briefly
from spark_hvd.world.layout import WorldLayout

R = TypeVar("R")
HOST = "127.0.0.1"
_STOP_GRACE = Grace(30.0, 10.0)
"""Enough for each rank to handle SIGTERM and to send its last output."""


@launcher(
    RunConfig,
    num_proc="Number of ranks.",
    env="Changes to the environment of the ranks; None as a value unsets a variable. OMP_NUM_THREADS is each rank's "
    "share of the cores, unless it is set here or in this process.",
    start_timeout="Seconds for all ranks to start.",
    max_restarts="Maximum number of restarts of all ranks after a signal kills one; see :func:`spark_hvd.run`.",
)
@briefly
def run_local(
    config: RunConfig,
    fn: Callable[..., R],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 2,
    *,
    data: Mapping[str, Any] | None = None,
    backend: str | None = None,
    env: Mapping[str, str | None] | None = None,
    start_timeout: float = 600.0,
    timeout: float | None = None,
    verbose: int = 1,
    seed: int | None = None,
    max_restarts: int = 0,
    network: Network | None = None,
    reporting: Reporting | None = None,
) -> RunResult[R]:
    """Run ``fn(*args, **kwargs)`` on ``num_proc`` ranks of this machine, for debugging, tests and single machines.

    For fn and the caller, this behaves like :func:`spark_hvd.run`. Ranks use the loopback interface.

    Returns:
        The return values of fn, in rank order: a list that also records how the run went.

    Raises:
        ValueError, TypeError: An argument is wrong; nothing was started.
        UnpicklableError: fn or an argument cannot be pickled.
        RankFailedError: A rank raised, exited or was killed.
        RunTimeoutError: ``timeout`` expired.
        HubError: The hub between ranks and driver failed.
        KeyboardInterrupt: after every rank has been stopped.
    """
    config = adapted(config)
    config = replace(config, env=env_here(config, num_proc))
    check_system()
    sets = run_data_of(data).without_spark("run_local")
    payload = dump_call(fn, args, kwargs or {})
    run_id = f"spark_hvd-{uuid.uuid4().hex[:12]}"
    with sets.on_disk() as folders, make_monitor(config, fn, num_proc) as monitor:
        given_data = {"sources": sets.sources, "folders": folders, "maps": sets.maps}

        def start(generation: int, lost: RunError | None) -> list[R]:
            return _attempt(config, run_id, payload, num_proc, monitor, generation, given_data)

        return monitor.result(with_restarts(start, config.max_restarts))


def _attempt(
    config: RunConfig,
    run_id: str,
    payload: bytes,
    num_proc: int,
    monitor: Monitor,
    generation: int,
    data: Mapping[str, Any],
) -> list[Any]:
    with ExitStack() as cleanup:
        hub = Hub(HubState(num_proc, timeout=config.timeout), HOST, listener=monitor.hear, ports=config.port_range)
        cleanup.callback(hub.close)
        spec = TaskSpec(config, run_id, hub.address, generation=generation, **data)
        job = ThreadJob(lambda task: _run_ranks(spec, payload, num_proc), 1)
        attend(job, hub, monitor, _STOP_GRACE)
        order = hub.snapshot()[1]
    monitor.flush()
    (packed,) = job.results()
    return results(packed, num_proc, order, config.timeout, monitor.hang)


def env_here(config: CommonConfig, ranks: int) -> Mapping[str, str | None]:
    """Return changes to the ranks' environment that divide the cores: torch would start one thread per core."""
    share = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks))}
    return {**share, **config.env}


def _run_ranks(spec: TaskSpec, payload: bytes, size: int) -> list[PickledOutcome]:
    layout = WorldLayout.from_hosts([HOST] * size)
    assert spec.hub is not None
    server = fork_server(spec.config.env, os.getpid())
    links = [Link(spec.hub, rank) for rank in range(size)]
    try:
        if not meet(links, 0, spec.config.start_timeout):
            raise RefusedError(f"the ranks cannot connect to this process on {HOST}: is the loopback interface up?")
        return run_ranks(spec, payload, layout, layout.ranks, links, server, None)
    finally:
        for link in links:
            link.close()
