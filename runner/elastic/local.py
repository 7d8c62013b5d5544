"""``run_elastic_local``: the contract of ``run_elastic`` on this machine; no Spark, no Java."""

from __future__ import annotations

import itertools
import os
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, TextIO, TypeVar

from spark_hvd.runner.elastic.agent import AgentReport, GivenUpError
from spark_hvd.runner.elastic.config import ElasticConfig
from spark_hvd.runner.elastic.hub import ElasticHub
from spark_hvd.runner.elastic.results import elastic_results
from spark_hvd.runner.elastic.run import attend
from spark_hvd.runner.elastic.task import ElasticSpec, run_agent
from spark_hvd.runner.launch.local import HOST, cores_each
from spark_hvd.runner.launch.monitor import make_monitor
from spark_hvd.runner.launch.result import RunResult
from spark_hvd.runner.options import launcher
from spark_hvd.runner.outcome.payload import dump_call, name_of
from spark_hvd.runner.supervise.processes import check_system
from spark_hvd.runner.supervise.task import TaskSpec
from spark_hvd.runner.tracebacks import briefly
from spark_hvd.runner.watch.tracking import Tracker

R = TypeVar("R")


@launcher(
    ElasticConfig,
    num_proc="Ranks to start with.",
    start_timeout="Seconds for the ranks' processes to be up.",
    host_failure_limit="Ranks that may fail, with no commit of theirs in between, until no more are started.",
    cooldown_range="Least and greatest number of seconds until they are again; None for never.",
)
@briefly
def run_elastic_local(
    fn: Callable[..., R],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 2,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    *,
    elastic_timeout: float = 600.0,
    reset_limit: int | None = None,
    rejoin_timeout: float = 30.0,
    host_failure_limit: int = 2,
    cooldown_range: tuple[float, float] | None = None,
    backend: str | None = None,
    env: Mapping[str, str | None] | None = None,
    start_timeout: float = 600.0,
    timeout: float | None = None,
    collective_timeout: float = 1800.0,
    verbose: int = 1,
    progress: str = "auto",
    tracker: Tracker | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
) -> RunResult[R]:
    """Run ``fn(*args, **kwargs)`` on ranks of this machine that may be lost; to rehearse failures, and for tests.

    The same as :func:`spark_hvd.run_elastic` in everything that fn and the caller can see. Here no executor is ever
    lost: a rank that dies is replaced at once.

    Returns:
        What fn returned on every rank of the last generation, in rank order.

    Raises:
        ValueError, TypeError: an argument is wrong; nothing was started.
        RunError: as of :func:`spark_hvd.run_elastic`.
        KeyboardInterrupt: after every rank has been stopped.
    """
    config = ElasticConfig.of(locals())
    if "OMP_NUM_THREADS" not in os.environ:
        threads = str(cores_each(config.limits.max_num_proc))
        config = replace(config, env={"OMP_NUM_THREADS": threads, **config.env})
    check_system()
    payload = dump_call(fn, args, kwargs or {})
    with make_monitor(config, name_of(fn), num_proc, stdout, stderr, tracker) as monitor, ExitStack() as closing:
        hub = ElasticHub(config.limits, HOST, None, monitor)
        closing.callback(hub.close)
        monitor.ask(hub)
        task = TaskSpec(config, f"spark_hvd-{uuid.uuid4().hex[:12]}", hub.address)
        job = _Threads(ElasticSpec(task, rejoin_timeout), payload, config.limits.max_num_proc)
        verdict = attend(job, hub, config, monitor)
        if job.errors:
            raise job.errors[0]
        assert verdict is not None
        return monitor.result(elastic_results(verdict, job.reports, monitor.hang))


class _Threads:
    """Agents as threads of this process."""

    def __init__(self, spec: ElasticSpec, payload: bytes, count: int) -> None:
        self.reports: list[AgentReport] = []
        self.errors: list[BaseException] = []
        self._spec, self._payload = spec, payload
        self._numbers = itertools.count()
        self._threads = [
            threading.Thread(target=self._run, args=[task], name=f"spark_hvd-agent-{task}", daemon=True)
            for task in range(count)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def running(self) -> bool:
        """Whether any is left."""
        return any(thread.is_alive() for thread in self._threads)

    def wait(self, timeout: float) -> None:
        """Wait for the end, at most ``timeout`` seconds."""
        for thread in self._threads:
            if thread.is_alive():
                thread.join(timeout)
                return

    def cancel(self) -> None:
        """Agents end when their hub does."""

    def _run(self, task: int) -> None:
        # What Spark does with a task that fails because it was given up: it starts it anew.
        while self._once(task):
            pass

    def _once(self, task: int) -> bool:
        try:
            number = next(self._numbers)
            report = run_agent(
                self._spec,
                self._payload,
                number=number,
                task=task,
                host=HOST,
                executor="",
                anchor=os.getpid(),
                gpus=None,
            )
            self.reports.append(report)
        except GivenUpError:
            return True
        except BaseException as error:
            self.errors.append(error)
        return False
