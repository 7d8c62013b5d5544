"""What is asked of PySpark about the application, on the driver."""

from __future__ import annotations

import logging
import re
import tempfile
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from spark_hvd.runner.outcome.errors import ClusterError, NotEnoughSlotsError
from spark_hvd.runner.spark import private as spark_private

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from spark_hvd.runner.spark.profiles import TaskResources

_log = logging.getLogger(__name__)
_SETTLE = 10.0
"""Seconds that executors get to register when the configuration does not say how many there will be."""


def active_session(spark: SparkSession | None) -> SparkSession:
    """Return ``spark``, or the session that is active in this thread or application.

    Raises:
        ClusterError: there is none.
    """
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    if spark is not None:
        return spark
    try:
        return SparkSession.active()  # else the default one: threads that the user started have none of their own
    except PySparkException as error:
        raise ClusterError(
            "there is no active Spark session. Create one first (SparkSession.builder.getOrCreate()) or pass spark=; "
            "to train without Spark, on this machine only, use spark_hvd.run_local."
        ) from error


def is_connect(spark: SparkSession) -> bool:
    """Whether the session is a Spark Connect client, with no JVM in reach."""
    return "connect" in type(spark).__module__


def conf(spark: SparkSession, key: str) -> str | None:
    """A setting of the application or the session, or None."""
    value: str | None = spark.conf.get(key, None)
    return value


def is_local(spark: SparkSession) -> bool:
    """Whether all tasks run in the driver's own JVM (``local[N]``; not ``local-cluster``)."""
    master = conf(spark, "spark.master") or ""
    return not is_connect(spark) and (master == "local" or master.startswith("local["))


def max_result_bytes(spark: SparkSession) -> int | None:
    """How many bytes of values a job may return before Java heap runs out and takes the application along.

    Spark holds a result about five times on its way (measured with 2 x 200 MiB: 1 GiB and 1.5 GiB of heap fail, 2 GiB
    is enough), and fails badly: an OutOfMemoryError in one of its own threads, after which jobs hang.
    """
    if is_connect(spark):
        return None
    heap, limit = spark_private.heap_and_result_limit(spark)
    return min(heap // 5, limit or heap)


def temporary_directory(spark: SparkSession) -> tempfile.TemporaryDirectory[str]:
    """A directory that goes with the run, and with Spark's own temporary files should this process be killed."""
    return tempfile.TemporaryDirectory(prefix="spark_hvd-", dir=spark_private.temporary_folder(spark))


def check_barrier_possible(spark: SparkSession) -> None:
    """Refuse what Spark would refuse later, with less help.

    Raises:
        ClusterError: dynamic allocation is on (SPARK-24942).
    """
    if not is_local(spark) and conf(spark, "spark.dynamicAllocation.enabled") == "true":
        raise ClusterError(
            "spark.dynamicAllocation.enabled=true: Spark runs no barrier stage with dynamic allocation (SPARK-24942), "
            "and ranks that train together need one. Start the application with spark.dynamicAllocation.enabled=false "
            "and a fixed number of executors (spark.executor.instances)."
        )


def has_dynamic_allocation(spark: SparkSession) -> bool:
    """Whether Spark starts executors as tasks wait for them."""
    return not is_local(spark) and conf(spark, "spark.dynamicAllocation.enabled") == "true"


def check_elastic_possible(spark: SparkSession) -> None:
    """Refuse, or warn of, settings with which an elastic run could not do what it promises.

    Raises:
        ClusterError: it cannot run at all.
    """
    if is_connect(spark):
        raise ClusterError(
            "an elastic run is decided on the driver, which executors must reach: with Spark Connect this program is "
            "none. Run it as a classic application (spark-submit, or SparkSession.builder.master(...)), or use "
            "spark_hvd.run(..., max_restarts=...)"
        )
    if conf(spark, "spark.speculation") == "true":
        raise ClusterError(
            "spark.speculation=true: Spark would start a second copy of tasks that run for long, which all ranks do. "
            "Start the application with spark.speculation=false"
        )
    failures = int(conf(spark, "spark.task.maxFailures") or 4)
    if not is_local(spark) and failures < 2:
        _log.warning(
            "spark.task.maxFailures=%d: Spark will end the run with the first executor that is lost; start the "
            "application with more (Spark counts lost executors for each task)",
            failures,
        )
    if conf(spark, "spark.excludeOnFailure.enabled") == "true":
        _log.warning(
            "spark.excludeOnFailure.enabled=true: Spark may exclude hosts after lost executors, for good; an elastic "
            "run excludes hosts itself (host_failure_limit=, cooldown_range=)"
        )


def slots(spark: SparkSession, resources: TaskResources) -> int | None:
    """How many tasks the cluster can run at once, busy or not; None where it cannot be asked (Spark Connect)."""
    if is_connect(spark):
        return None
    there = spark_private.task_slots(spark, resources.profile)
    if is_local(spark):  # it knows no profiles: the cores are there, if we count them ourselves
        there = there * int(conf(spark, "spark.task.cpus") or 1) // resources.plan.cpus
        if resources.plan.gpus and resources.plan.gpus_there is not None:
            there = min(there, int(resources.plan.gpus_there / resources.plan.gpus))
    return there


def busy_tasks(spark: SparkSession) -> int:
    """How many tasks of other jobs run now; 0 where that cannot be asked (Spark Connect)."""
    if is_connect(spark):
        return 0
    tracker = spark.sparkContext.statusTracker()
    stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
    return sum(stage.numActiveTasks for stage in stages if stage is not None)


def driver_hosts(spark: SparkSession) -> tuple[str, str]:
    """By which name or address executors reach the driver, and on which it is to listen."""
    public = conf(spark, "spark.driver.host") or "127.0.0.1"
    return public, conf(spark, "spark.driver.bindAddress") or public


def wait_for_slots(spark: SparkSession, num_proc: int | None, start_timeout: float, resources: TaskResources) -> int:
    """Wait until ``num_proc`` ranks can run at once, as long as that may still happen.

    Args:
        spark: The session.
        num_proc: Tasks wanted; None for as many as there are slots.
        start_timeout: Seconds to wait for executors that the configuration promises.
        resources: What each task takes.

    Returns:
        The number of tasks.

    Raises:
        ClusterError: the slots cannot be counted, and ``num_proc`` is None; NotEnoughSlotsError: naming the slots
            wanted, the slots there, and the settings to change.
    """
    started = time.monotonic()
    while True:
        there = slots(spark, resources)
        if there is None:
            if num_proc is None:
                raise ClusterError(
                    "num_proc=None means one rank for every task slot, and a Spark Connect client cannot count the "
                    "slots of the cluster. Give the number of ranks: num_proc="
                )
            return num_proc
        if num_proc is None and there:
            return there
        if num_proc is not None and there >= num_proc:
            return num_proc
        patience = _patience(spark, num_proc or 1, start_timeout, resources)
        if time.monotonic() - started >= patience:
            raise NotEnoughSlotsError(_too_few(spark, num_proc or 1, there, resources))
        time.sleep(0.1)


def _patience(spark: SparkSession, num_proc: int, start_timeout: float, resources: TaskResources) -> float:
    if is_local(spark):
        return 0.0
    executors = int(conf(spark, "spark.executor.instances") or 0)
    cores = int(conf(spark, "spark.executor.cores") or 1)
    each = cores // resources.plan.cpus
    if resources.plan.gpus and resources.plan.gpus_there is not None:
        each = min(each, int(resources.plan.gpus_there / resources.plan.gpus))
    promised = executors * each
    return start_timeout if promised >= num_proc else min(start_timeout, _SETTLE)


def _too_few(spark: SparkSession, num_proc: int, there: int, resources: TaskResources) -> str:
    settings = (
        "spark.executor.instances",
        "spark.executor.cores",
        "spark.cores.max",
        "spark.task.cpus",
        "spark.executor.resource.gpu.amount",
        "spark.task.resource.gpu.amount",
    )
    now = ", ".join(f"{key}={value}" for key in settings if (value := conf(spark, key)) is not None)
    master = conf(spark, "spark.master") or ""
    if is_local(spark):
        remedy = f'Ask for fewer ranks, or start the session with master("local[{num_proc * resources.plan.cpus}]")'
    else:
        remedy = (
            "Ask for fewer ranks, or give the application more executors or cores (spark.executor.instances, "
            "spark.executor.cores, spark.cores.max; fewer spark.task.cpus a task)"
        )
    asked = f", {resources.plan.ask}" if str(resources.plan.ask) else ""
    slots_there = f"{num_proc} slots wanted, {there} there{_amounts_there(spark, num_proc, resources)}"
    return (
        f"num_proc={num_proc}{asked}: {slots_there} (master {master}{', ' + now if now else ''}). "
        f"All ranks run at the same time, each in a Spark task. {remedy}."
    )


def _host_and_port(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)


def _amounts_there(spark: SparkSession, num_proc: int, resources: TaskResources) -> str:
    """Cores and GPUs, wanted and there, where a slot is more than one core."""
    plan = resources.plan
    texts = []
    executors = 1 if is_local(spark) else spark_private.count_executors(spark)
    if plan.gpus and plan.gpus_there is not None:
        texts.append(f"{num_proc * plan.gpus:g} GPUs wanted, {executors * plan.gpus_there} there")
    if plan.cpus > 1:
        texts.append(f"{num_proc * plan.cpus} cores wanted, {plan.cpus} in one executor for each task")
    return f": {'; '.join(texts)}" if texts else ""


def executor_addresses(spark: SparkSession) -> dict[str, tuple[str, int]]:
    """Host and port of every executor that Spark holds to be alive, by its name; none where it cannot tell."""
    if is_connect(spark):
        return {}
    try:
        return listening(spark_private.executor_ports(spark))
    except Exception as error:
        spark_private.does_not_tell(
            spark,
            "where executors are",
            "A host that stops answering is noticed only when Spark's timeouts end.",
            error,
        )
        return {}


def listening(executors: Mapping[str, str]) -> dict[str, tuple[str, int]]:
    """Host and port of those executors that have one; Spark knows one that is starting by its host alone."""
    return {name: _host_and_port(text) for name, text in executors.items() if re.search(r":\d+$", text)}
