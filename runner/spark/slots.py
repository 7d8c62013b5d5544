"""How many tasks can run at once, and the wait for enough of them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from spark_hvd.runner.outcome.errors import ClusterError, NotEnoughSlotsError
from spark_hvd.runner.spark import private as spark_private
from spark_hvd.runner.spark.profiles import TaskResources
from spark_hvd.runner.spark.session import conf, is_connect, is_local
from spark_hvd.runner.stopping import check_stop

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SETTLE = 10.0
"""Seconds that another executor gets to register when the configuration does not say how many there will be."""
_FIRST = 60.0
"""Seconds that the first one gets: an application that has just started asks for its executors, whose JVMs start."""


def task_slots(spark: SparkSession, resources: TaskResources) -> int | None:
    """How many tasks the cluster can run at once, busy or not; None where it cannot be asked (Spark Connect)."""
    if is_connect(spark):
        return None
    there = spark_private.task_slots(spark, resources.profile)
    if is_local(spark):  # it knows no profiles: the cores are there, if we count them ourselves
        there = there * int(conf(spark, "spark.task.cpus") or 1) // resources.plan.cpus
        if resources.plan.gpus and resources.plan.gpus_there is not None:
            there = min(there, int(resources.plan.gpus_there / resources.plan.gpus))
    return there


def wait_for_slots(spark: SparkSession, num_proc: int | None, start_timeout: float, resources: TaskResources) -> int:
    """Wait until ``num_proc`` ranks can run at once, as long as that may still happen.

    Args:
        spark: The session.
        num_proc: Tasks wanted; None for as many as there are slots.
        start_timeout: Seconds to wait for executors that the configuration promises, and the most for others.
        resources: What each task takes.

    Returns:
        The number of tasks.

    Raises:
        ClusterError: the slots cannot be counted, and ``num_proc`` is None; NotEnoughSlotsError: naming the slots
            wanted, the slots there, and the settings to change.
    """
    started = grown = time.monotonic()
    most = 0
    while True:
        there = task_slots(spark, resources)
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
        now = time.monotonic()
        if there > most:
            most, grown = there, now
        settled = now - grown >= (_SETTLE if most else _FIRST) and not _promised(spark, num_proc or 1, resources)
        if is_local(spark) or settled or now - started >= start_timeout:
            raise NotEnoughSlotsError(_too_few(spark, num_proc or 1, there, resources))
        check_stop()
        time.sleep(0.1)


def _promised(spark: SparkSession, num_proc: int, resources: TaskResources) -> bool:
    """Whether the configuration says that there will be as many executors as that takes."""
    executors = int(conf(spark, "spark.executor.instances") or 0)
    cores = int(conf(spark, "spark.executor.cores") or 1)
    each = cores // resources.plan.cpus
    if resources.plan.gpus and resources.plan.gpus_there is not None:
        each = min(each, int(resources.plan.gpus_there / resources.plan.gpus))
    return executors * each >= num_proc


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
