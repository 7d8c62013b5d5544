"""Runs one Spark job in a separate thread, and reports what Spark knows about its tasks."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

from spark_hvd.runner.outcome.report import Where
from spark_hvd.runner.outcome.rows import SCHEMA, Row
from spark_hvd.runner.spark import private as spark_private
from spark_hvd.runner.spark.errors import heap_full
from spark_hvd.runner.spark.names import call_site, job_group, job_named
from spark_hvd.runner.spark.reach import Placement
from spark_hvd.runner.spark.session import choose_python, executor_addresses, is_connect

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile
    from pyspark.sql import DataFrame, SparkSession

P = ParamSpec("P")
R = TypeVar("R")
_log = logging.getLogger(__name__)
_CANCEL_EVERY = 0.5


@dataclass(frozen=True, slots=True)
class TaskAttempt:
    """One attempt of a task.

    ``number`` is unique in the application; ``leaving`` means that the attempt's executor is being decommissioned.
    """

    number: int
    runs: bool
    executor: str
    leaving: bool


@dataclass(slots=True)
class Reported:
    """What a Spark Connect server has reported about a query whose last stage has ``num_tasks`` tasks."""

    num_tasks: int
    has_input: bool
    _newest: int = -1
    _begun: int = 0
    _running: int = 0

    def note(self, stages: Iterable[Any], running: int) -> None:
        """Take a report about all stages so far, of whose tasks ``running`` run at this moment.

        The last stage runs when those of the input are done. Another stage may look the same, if it has as many tasks
        and is not the first.
        """
        *others, newest = sorted(stages, key=lambda stage: stage.stage_id)
        if newest.stage_id != self._newest:
            self._newest, self._begun = newest.stage_id, 0
        done = {stage.done for stage in others if stage.done or stage.num_completed_tasks}  # without skipped ones
        if newest.num_tasks == self.num_tasks and done == ({True} if self.has_input else set()):
            self._begun = max(self._begun, running + newest.num_completed_tasks)
        self._running = running

    @property
    def placed(self) -> bool:
        """Whether all tasks of the last stage have started."""
        return self._begun >= self.num_tasks

    @property
    def computing(self) -> bool:
        """Whether tasks of other stages run."""
        return self.has_input and self._running > 0 and not self.placed


def inheriting(spark: SparkSession, target: Callable[P, R]) -> Callable[P, R]:
    """Wrap `target` so that another thread runs it with this thread's local properties, such as its scheduler pool.

    With the session, Spark 4 also passes on this thread's tags. Spark 3.5 accepts a function only, and has nothing of
    the kind for Spark Connect.
    """
    import pyspark
    from pyspark import inheritable_thread_target

    if int(pyspark.__version__.partition(".")[0]) >= 4:
        wrapped: Callable[P, R] = inheritable_thread_target(spark)(target)
        return wrapped
    return target if is_connect(spark) else cast("Callable[P, R]", inheritable_thread_target(target))


def cancel_jobs(spark: SparkSession, tag: str, ended: Callable[[float], bool]) -> None:
    """Ask Spark to kill the tasks of all jobs with a tag, again and again until they have ended.

    Spark ignores a request while it has no such job: when it still plans a query, or between two jobs of one.
    ``ended`` waits at most the given number of seconds, and tells whether they have.
    """
    level = logging.WARNING
    while True:
        try:
            (spark.interruptTag if is_connect(spark) else spark.sparkContext.cancelJobsWithTag)(tag)
        except Exception as error:
            _log.log(level, "could not cancel the Spark job of this run: %s", error)
            level = logging.DEBUG
        if ended(_CANCEL_EVERY):
            return


class TaskJob:
    """One stage, run in a separate thread so that the caller can print, time out and be interrupted.

    The stage is the job's result stage, which Spark never retries. If a shuffle followed, Spark would retry the whole
    stage and silently run fn twice. ``tag`` is unique and serves to cancel the job. Without ``barrier``, tasks start as
    slots become free. ``profile`` says what each task takes from its executor; None means the application's amounts.
    ``input_frame`` is the tasks' input, with a partition for each task; None means that they need no input.

    Attributes:
        has_input: Whether other stages compute the tasks' input first.
    """

    def __init__(
        self,
        spark: SparkSession,
        num_tasks: int,
        task: Callable[[Iterator[Any]], Iterator[Any]],
        description: str,
        tag: str,
        profile: ResourceProfile | None = None,
        *,
        barrier: bool = True,
        input_frame: DataFrame | None = None,
    ) -> None:
        self._spark = spark
        self._num_tasks = num_tasks
        self._tag = tag
        self._description = description
        self._place = call_site(description)
        choose_python(spark)
        given = {} if profile is None else {"profile": profile}  # PySpark 3.5 has no such argument
        self.has_input = input_frame is not None
        frame = spark.range(0, num_tasks, 1, num_tasks) if input_frame is None else input_frame
        try:
            self._frame = frame.mapInArrow(task, SCHEMA, barrier=barrier, **given)  # PySpark sends large functions here
        except Exception as error:
            if (full := heap_full(error)) is not None:
                raise full from error
            raise
        self.rows: list[Row] = []
        self.error: Exception | None = None
        self._reported: Reported | None = None  # by a Spark Connect server
        self._placed = False
        target = inheriting(spark, self._run)
        # An event rather than Thread.join(): if Ctrl-C interrupts join(), Python 3.10 to 3.12 believe that a running
        # thread has ended (bpo-45274).
        self._ended = threading.Event()
        self._cancelled = False
        # A daemon thread, so that an interrupted program can exit while Spark is still cancelling.
        threading.Thread(target=target, name="spark_hvd-job", daemon=True).start()

    @property
    def running(self) -> bool:
        """Whether the job has not ended yet."""
        return not self._ended.is_set()

    def wait(self, timeout: float) -> None:
        """Wait at most ``timeout`` seconds for the job to end."""
        self._ended.wait(timeout)

    def cancel(self) -> None:
        """Let Spark kill the tasks, also those that it has not started yet, and return at once."""
        if not self._cancelled:
            self._cancelled = True
            asked = self._spark, self._tag, self._ended.wait
            threading.Thread(target=cancel_jobs, args=asked, name="spark_hvd-cancel", daemon=True).start()

    @property
    def placed(self) -> bool | None:
        """Whether Spark has started all tasks; None if it does not say (Spark Connect 3.5)."""
        if is_connect(self._spark):
            return None if self._reported is None else self._reported.placed
        if not self._placed:
            placement = self.placement()
            self._placed = placement is not None and len(placement.tasks) == self._num_tasks
        return self._placed

    @property
    def computing(self) -> bool:
        """Whether Spark is computing the tasks' input, as far as it says."""
        if is_connect(self._spark):
            return self._reported is not None and self._reported.computing
        return self.has_input and not self._placed and self.placement() is None

    def placement(self) -> Placement | None:
        """Return where Spark has put the tasks so far; None if it does not say (Spark Connect)."""
        if is_connect(self._spark):
            return None
        try:
            tasks = spark_private.tasks_of(self._spark, self._tag, has_input=self.has_input)
        except Exception as error:
            lost = "A host that stops answering is noticed only when Spark's timeouts end, and errors name no executor."
            spark_private.does_not_tell(self._spark, "where tasks are", lost, error)
            return None
        if not tasks:
            return None
        return Placement(
            {task.partition: (task.executor, task.host.strip("[]")) for task in tasks},
            executor_addresses(self._spark),
            self._num_tasks,
        )

    def where(self, size: int) -> Where:
        """Return where the ranks are and the address of their stage's page in the Spark UI, as far as Spark says.

        ``size`` is the number of ranks, or 0 if tasks have no fixed ranks.
        """
        placement = self.placement() if size else None
        return Where({} if placement is None else placement.executors_of_ranks(size), self._page())

    def _page(self) -> str:
        """Return the address of the stage's page; empty if there is none."""
        if is_connect(self._spark):
            return ""
        try:
            address = self._spark.sparkContext.uiWebUrl
            stage = spark_private.stage_of(self._spark, self._tag, has_input=self.has_input)
            if address is None or stage is None:
                return ""
            return f"{address}/stages/stage/?id={stage.stageId()}&attempt={stage.attemptId()}"
        except Exception as error:
            lost = "Errors of runs have no link to the Spark UI."
            spark_private.does_not_tell(self._spark, "which stage a run is", lost, error)
            return ""

    def attempts(self) -> list[TaskAttempt]:
        """Return the attempts of tasks that Spark has started; empty if it does not say."""
        if is_connect(self._spark):
            return []
        try:
            found = spark_private.tasks_of(self._spark, self._tag)
            leaving = spark_private.decommissioned(self._spark, {task.executor for task in found})
        except Exception as error:
            lost = "Elastic runs notice lost executors by their silence alone, and decommissioned ones not in advance."
            spark_private.does_not_tell(self._spark, "how tasks are", lost, error)
            return []
        return [
            TaskAttempt(task.number, task.status == "RUNNING", task.executor, task.executor in leaving)
            for task in found
        ]

    def _run(self) -> None:
        try:
            if is_connect(self._spark):
                self._spark.addTag(self._tag)
            else:
                self._spark.sparkContext.addJobTag(self._tag)
            named = job_named(self._frame, self._description, *self._place)
            with job_group(self._spark, self._tag), named, self._counted():
                if not self._cancelled:
                    self._collect()
        except Exception as error:
            self.error = error
        finally:
            self._ended.set()

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Note what a Spark Connect server reports to this thread."""
        if not is_connect(self._spark) or not hasattr(self._spark, "registerProgressHandler"):  # as in Spark 3.5
            yield
            return
        here = threading.get_ident()
        reported = self._reported = Reported(self._num_tasks, self.has_input)

        def count(stages: Iterable[Any] | None, inflight_tasks: int, operation_id: str | None, done: bool) -> None:
            if threading.get_ident() == here and stages:  # not for another thread's query in the same session
                reported.note(stages, inflight_tasks)

        self._spark.registerProgressHandler(count)  # type: ignore[arg-type] # any function will do
        try:
            yield
        finally:
            self._spark.removeProgressHandler(count)  # type: ignore[arg-type]

    def _collect(self) -> None:
        # toArrow (Spark 4) takes a third of the memory that rows take when values are large.
        if hasattr(self._frame, "toArrow"):
            table = self._frame.toArrow()
            columns = [table.column(name).to_pylist() for name in table.column_names]
            self.rows = list(zip(*columns, strict=True))
        else:
            self.rows = [(row[0], row[1], row[2], bytes(row[3])) for row in self._frame.collect()]
