"""``run_elastic_local``: ``run_elastic`` on this machine, without Spark or Java."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from spark_hvd.runner.config import Network, Reporting
from spark_hvd.runner.elastic.config import ElasticConfig
from spark_hvd.runner.elastic.hub import ElasticHub
from spark_hvd.runner.elastic.results import elastic_results
from spark_hvd.runner.elastic.run import attend_elastic
from spark_hvd.runner.elastic.task import ElasticSpec, run_agent
from spark_hvd.runner.launch.arguments import adapted, launcher
from spark_hvd.runner.launch.attend import ThreadJob
from spark_hvd.runner.launch.data import run_data_of
from spark_hvd.runner.launch.local import HOST, env_here
from spark_hvd.runner.launch.monitor import make_monitor
from spark_hvd.runner.launch.result import RunResult
from spark_hvd.runner.launch.stored import stored
from spark_hvd.runner.outcome.payload import dump_call
from spark_hvd.runner.supervise.processes import check_system
from spark_hvd.runner.supervise.task import TaskSpec
from spark_hvd.runner.tracebacks import briefly

R = TypeVar("R")


@launcher(
    ElasticConfig,
    num_proc="Ranks to start with.",
    start_timeout="Seconds for the ranks' processes to start.",
    host_failure_limit="Number of ranks that may fail, without a commit in between, before no more are started.",
    cooldown_range="Minimum and maximum number of seconds until ranks are started again; None means never.",
)
@briefly
def run_elastic_local(
    config: ElasticConfig,
    fn: Callable[..., R],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 2,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    *,
    data: Mapping[str, Any] | None = None,
    elastic_timeout: float = 600.0,
    reset_limit: int | None = None,
    rejoin_timeout: float = 30.0,
    host_failure_limit: int = 2,
    cooldown_range: tuple[float, float] | None = None,
    backend: str | None = None,
    env: Mapping[str, str | None] | None = None,
    start_timeout: float = 600.0,
    timeout: float | None = None,
    verbose: int = 1,
    seed: int | None = None,
    network: Network | None = None,
    reporting: Reporting | None = None,
) -> RunResult[R]:
    """Run ``fn(*args, **kwargs)`` on elastic ranks of this machine, to rehearse failures and for tests.

    For fn and the caller, this behaves like :func:`spark_hvd.run_elastic`. No executor can be lost here, and a rank
    that dies is replaced at once.

    Returns:
        The return values of fn on the ranks of the last generation, in rank order.

    Raises:
        ValueError, TypeError: An argument is wrong; nothing was started.
        RunError: As raised by :func:`spark_hvd.run_elastic`.
        KeyboardInterrupt: after every rank has been stopped.
    """
    config = adapted(config)
    config = replace(config, env=env_here(config, config.limits.max_num_proc))
    check_system()
    sets = run_data_of(data).without_spark("run_elastic_local")
    payload = dump_call(fn, args, kwargs or {})
    with stored(sets) as sources, make_monitor(config, fn, num_proc) as monitor, ExitStack() as closing:
        hub = ElasticHub(config.limits, HOST, None, monitor.hear, config.port_range)
        closing.callback(hub.close)
        task = TaskSpec(config, f"spark_hvd-{uuid.uuid4().hex[:12]}", hub.address, sources=sources, maps=sets.maps)
        spec = ElasticSpec(task, rejoin_timeout, restarts_tasks=False)
        agent = partial(run_agent, spec, payload, host=HOST, executor="", anchor=os.getpid(), gpus=None)
        job = ThreadJob(lambda number: agent(number=number, task=number), config.limits.max_num_proc)
        attend_elastic(job, hub, config, monitor)
        return monitor.result(elastic_results(hub, job.results(), monitor.hang))
