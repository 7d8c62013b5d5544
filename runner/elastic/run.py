"""``run_elastic``: runs a function on ranks that join and leave with Spark's executors."""

from __future__ import annotations

import logging
import os
import pickle
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from spark_hvd.runner.config import CommonConfig, Network, Reporting
from spark_hvd.runner.elastic.agent import AgentReport
from spark_hvd.runner.elastic.config import ElasticConfig
from spark_hvd.runner.elastic.hub import ElasticHub
from spark_hvd.runner.elastic.membership.events import End, Verdict
from spark_hvd.runner.elastic.results import elastic_results
from spark_hvd.runner.elastic.task import ElasticSpec
from spark_hvd.runner.launch.arguments import adapted, launcher
from spark_hvd.runner.launch.attempt import open_hub
from spark_hvd.runner.launch.attend import Grace, ThreadJob, attend
from spark_hvd.runner.launch.data import run_data_of
from spark_hvd.runner.launch.monitor import Monitor, make_monitor
from spark_hvd.runner.launch.prestart import torch_loading
from spark_hvd.runner.launch.result import RunResult
from spark_hvd.runner.launch.stored import stored
from spark_hvd.runner.outcome.errors import RunTimeoutError
from spark_hvd.runner.outcome.payload import dump_call, name_of
from spark_hvd.runner.outcome.report import with_hang
from spark_hvd.runner.outcome.rows import from_rows
from spark_hvd.runner.spark import session as on_spark
from spark_hvd.runner.spark.entry import task_of
from spark_hvd.runner.spark.errors import translate_elastic
from spark_hvd.runner.spark.job import TaskJob
from spark_hvd.runner.spark.profiles import ResourceRequest, task_resources
from spark_hvd.runner.spark.slots import wait_for_slots
from spark_hvd.runner.supervise.processes import check_system
from spark_hvd.runner.supervise.task import TaskSpec
from spark_hvd.runner.terminal import harmless
from spark_hvd.runner.tracebacks import briefly
from spark_hvd.world.words import count

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from spark_hvd.store import Store

R = TypeVar("R")
_log = logging.getLogger(__name__)
_ASK_SPARK_EVERY = 0.5
_CANCEL_GRACE = Grace(0.5, 0.0, 0.5)
"""For a run whose values have all arrived."""
_STOP_GRACE = Grace(10.0, 5.0)
"""For a run that failed, so that its ranks can still send their errors."""


@launcher(ElasticConfig)
@briefly
def run_elastic(
    config: ElasticConfig,
    fn: Callable[..., R],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    *,
    data: Mapping[str, Any] | None = None,
    data_store: str | os.PathLike[str] | Store | None = None,
    spark: SparkSession | None = None,
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
    cpus_per_proc: int | None = None,
    gpus_per_proc: int | None = None,
    network: Network | None = None,
    reporting: Reporting | None = None,
) -> RunResult[R]:
    """Run ``fn(*args, **kwargs)`` on ranks that may leave and join during training.

    fn prepares data, model and optimizer, and then calls a function that is decorated with ``hvd.elastic.run``; see
    :mod:`spark_hvd.torch.elastic` and docs/elastic.md. When a rank is lost, the others return to their last commit and
    continue without it. New ranks, which replace lost ones or run on new executors, join at a commit. Ranks are child
    processes of the tasks of one ordinary Spark job with `max_num_proc` tasks; tasks without a slot wait for one.

    Returns:
        The return values of fn on the ranks of the last generation, in rank order: a list that also records how the run
        went.

    Raises:
        ValueError, TypeError: An argument is wrong; nothing was started.
        UnpicklableError: fn or an argument cannot be pickled. Nothing was started.
        ClusterError: The application cannot run this (speculation, too few slots, a driver that executors cannot
            reach).
        StartTimeoutError: fewer than `min_num_proc` tasks started in `start_timeout`.
        TooFewRanksError: fewer than `min_num_proc` ranks were left for `elastic_timeout`, or fn calls no elastic
            function and has returned on fewer ranks than the run began with.
        ResetLimitError: More failures than `reset_limit`.
        StateLostError: All ranks with the state were lost at once.
        RankFailedError: fn raised on all ranks, ranks kept failing without a commit in between, or they could not reach
            each other for `elastic_timeout`.
        RunTimeoutError: ``timeout`` expired.
        HubError: The hub between ranks and driver failed.
        KeyboardInterrupt: after every rank has been stopped.
    """
    config = adapted(config)
    sets = run_data_of(data)
    payload = dump_call(fn, args, kwargs or {})
    session = on_spark.active_session(spark)
    sets = sets.read_by(session)
    on_spark.check_elastic_possible(session)
    resources = task_resources(session, ResourceRequest(cpus_per_proc, gpus_per_proc, 1))
    if num_proc is None or not on_spark.has_dynamic_allocation(session):
        slots = wait_for_slots(session, min_num_proc or num_proc, start_timeout, resources)
        num_proc = num_proc or slots
    config = replace(config, num_proc=num_proc)
    name, run_id = name_of(fn), f"spark_hvd-{uuid.uuid4().hex[:12]}"
    with (
        torch_loading(session, config.env),
        stored(sets, data_store, session) as sources,
        make_monitor(config, fn, num_proc) as monitor,
        ExitStack() as closing,
    ):
        local = on_spark.is_local(session)
        if local:
            check_system()
        spool = closing.enter_context(on_spark.temporary_directory(session)) if local else None
        port_range = config.port_range
        hub = open_hub(session, lambda bind, public: ElasticHub(config.limits, bind, public, monitor.hear, port_range))
        closing.callback(hub.close)
        common_spec = TaskSpec(
            config,
            run_id,
            hub.address,
            spool,
            may_share_gpus=resources.plan.may_share,
            sources=sources,
            maps=sets.maps,
        )
        most = None if local else on_spark.max_result_bytes(session)
        value_limit = None if most is None else most // config.limits.max_num_proc
        spec = ElasticSpec(common_spec, rejoin_timeout, value_limit, not local)
        job = TaskJob(
            session,
            config.limits.max_num_proc,
            task_of("elastic.task", "run_elastic_task", pickle.dumps(spec), payload, spool=spool),
            f"spark_hvd: {name} on {config.limits.min_num_proc} to {config.limits.max_num_proc} ranks, elastic",
            run_id,
            resources.profile,
            barrier=False,
        )
        verdict = attend_elastic(job, hub, config, monitor, _watch_spark(job, hub))
        if job.error is not None and (verdict is None or verdict.end is End.DONE) and not hub.handed_over:
            raise translate_elastic(job.error) from job.error
        assert verdict is not None
        reports = [pickle.loads(packed.data) for packed in from_rows(job.rows)]
        known = [each for each in reports if isinstance(each, AgentReport)]
        return monitor.result(elastic_results(hub, known, monitor.hang, partial(job.where, 0)))


def attend_elastic(
    job: TaskJob | ThreadJob[Any],
    hub: ElasticHub,
    config: CommonConfig,
    monitor: Monitor,
    watch: Callable[[], None] = lambda: None,
) -> Verdict | None:
    """Wait until the job of an elastic run has ended or has nothing left to deliver; `watch` is called meanwhile.

    Returns:
        How the run has ended; None if the job ended first.

    Raises:
        RunTimeoutError: The run took longer than its ``timeout``.
    """
    deadline = None if config.timeout is None else time.monotonic() + config.timeout

    def look() -> Grace | None:
        _log_notes(hub)
        verdict = hub.verdict
        if verdict is None:
            watch()
        elif verdict.end is not End.DONE:
            return _STOP_GRACE
        if hub.handed_over:  # do not wait for Spark, which may wait for a host that does not answer
            return _CANCEL_GRACE
        if deadline is None or time.monotonic() <= deadline:
            return None
        if verdict is None:
            text = with_hang(
                f"the elastic run had not ended after timeout={config.timeout:g} s, with "
                f"{count(hub.resets, 'failure')} survived; all ranks were stopped. "
                "Give a larger timeout= if the run needs more time",
                monitor.hang,
            )
        else:
            text = (
                f"fn had returned on all ranks, but Spark had not handed over their values after "
                f"timeout={config.timeout:g} s: a task may hang on a host that does not answer. Save what matters "
                "inside fn, or give a larger timeout="
            )
        raise RunTimeoutError(text, (), monitor.hang)

    attend(job, hub, monitor, _STOP_GRACE, look)
    _log_notes(hub)
    return hub.verdict


def _log_notes(hub: ElasticHub) -> None:
    for note in hub.take_notes():
        _log.warning("%s", harmless(note))


def _watch_spark(job: TaskJob, hub: ElasticHub) -> Callable[[], None]:
    """Return a function that tells the hub which executors Spark has lost, and which will leave."""
    next_look = time.monotonic()

    def watch() -> None:
        nonlocal next_look
        if time.monotonic() < next_look:
            return
        started = time.monotonic()
        agents = set(hub.tasks().values())
        attempts = [attempt for attempt in job.attempts() if attempt.number in agents]
        hub.lost([each.number for each in attempts if not each.runs], "Spark has lost its executor, or its task")
        hub.leaving([each.number for each in attempts if each.runs and each.leaving], "it is being decommissioned")
        # Spark answers for one task at a time. With many tasks, most of the time should remain for printing.
        took = time.monotonic() - started
        next_look = started + max(_ASK_SPARK_EVERY, 5 * took)

    return watch
