"""Counts the tasks that can run at once, and waits for enough slots."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from spark_hvd.runner.outcome.errors import ClusterError, NotEnoughSlotsError
from spark_hvd.runner.spark import private as spark_private
from spark_hvd.runner.spark.profiles import Plan, TaskResources
from spark_hvd.runner.spark.session import conf, is_connect, is_local
from spark_hvd.runner.stopping import check_stop

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

AT_ONCE = "All ranks run at the same time, each in a Spark task."
"""Part of an error's message, before the remedy."""

_SETTLE = 10.0
"""Seconds that another executor gets to register if the configuration does not promise a number of executors; or as
many as the first one took, which may be more on a busy host."""
_FIRST = 60.0
"""Seconds that the first executor gets: when an application has just started, its executors' JVMs are starting."""


def task_slots(spark: SparkSession, resources: TaskResources) -> int | None:
    """Return how many tasks the cluster can run at once, busy slots included; None with Spark Connect."""
    if is_connect(spark):
        return None
    slots = spark_private.task_slots(spark, resources.profile)
    if is_local(spark):  # local mode has no profiles, so we compute what fits
        slots = slots * int(conf(spark, "spark.task.cpus") or 1) // resources.plan.cpus
        if resources.plan.gpus and resources.plan.gpus_there is not None:
            slots = min(slots, int(resources.plan.gpus_there / resources.plan.gpus))
    return slots


def wait_for_slots(spark: SparkSession, num_proc: int | None, start_timeout: float, resources: TaskResources) -> int:
    """Wait until ``num_proc`` tasks can run at once, as long as that may still happen.

    If ``num_proc`` is None, one slot is enough, and every slot gets a task. The wait lasts up to ``start_timeout``
    seconds if the configuration promises enough executors. Otherwise it ends once no new ones register.

    Returns:
        The number of tasks.

    Raises:
        NotEnoughSlotsError: There are too few. The message names the slots needed, the slots available, and the
            settings to change.
        ClusterError: ``num_proc`` is None, and a Spark Connect server does not say how many slots it has.
    """
    if is_connect(spark):
        return num_proc or _slots_of_server(spark, resources.plan)
    started = grown = time.monotonic()
    most, settle = 0, _FIRST
    while True:
        slots = task_slots(spark, resources) or 0
        if num_proc is None and slots:
            return slots
        if num_proc is not None and slots >= num_proc:
            return num_proc
        now = time.monotonic()
        if slots > most:
            settle = settle if most else max(_SETTLE, now - started)
            most, grown = slots, now
        executors = int(conf(spark, "spark.executor.instances") or 0)  # promised by the configuration
        promised = executors * _in_executor(spark, resources) >= (num_proc or 1)
        settled = now - grown >= settle and not promised
        if is_local(spark) or settled or now - started >= start_timeout:
            raise NotEnoughSlotsError(_too_few(spark, num_proc or 1, slots, resources))
        check_stop()
        time.sleep(0.1)


def _slots_of_server(spark: SparkSession, plan: Plan) -> int:
    """Count the tasks that a Spark Connect server can run at once by the partitions that it chooses for a range.

    Spark makes as many partitions as the cluster has cores, unless a setting fixes their number.
    """
    settings = ("spark.sql.leafNodeDefaultParallelism", "spark.default.parallelism")
    unknown = [f"{key}={value}" for key in settings if (value := conf(spark, key))]
    each = conf(spark, "spark.executor.cores")
    on_one_host = (conf(spark, "spark.master") or "").startswith("local[")
    if (plan.cpus > 1 or plan.gpus) and each is None and not on_one_host:
        unknown.append("spark.executor.cores=None")
    if unknown or (plan.gpus and plan.gpus_there is None):
        raise ClusterError(
            "num_proc=None means one rank for every task slot, but a Spark Connect client cannot count the slots of a "
            f"server with {', '.join(unknown) or 'GPUs that it does not count'}. Give the number of ranks: num_proc="
        )
    # Enough rows that none of the partitions is empty.
    partitions = spark.range(1 << 16).selectExpr("spark_partition_id() AS at").selectExpr("max(at) AS last").collect()
    cores = int(partitions[0]["last"]) + 1
    executors, inside = (1, cores) if each is None else (cores // int(each), int(each))
    slots = inside // plan.cpus
    if plan.gpus and plan.gpus_there is not None:
        slots = min(slots, int(plan.gpus_there / plan.gpus))
    if not executors * slots:
        raise NotEnoughSlotsError(
            f"num_proc=None{f', {plan.request}' if str(plan.request) else ''}: the server has {cores} core(s), and "
            f"a rank takes {plan.cpus}. Give the application more executors or cores, or ask for fewer"
        )
    return executors * slots


def _in_executor(spark: SparkSession, resources: TaskResources) -> int:
    """Return how many tasks an executor can run at once."""
    plan = resources.plan
    each = int(conf(spark, "spark.executor.cores") or 1) // plan.cpus
    return min(each, int(plan.gpus_there / plan.gpus)) if plan.gpus and plan.gpus_there is not None else each


def _too_few(spark: SparkSession, num_tasks: int, slots: int, resources: TaskResources) -> str:
    settings = (
        "spark.executor.instances",
        "spark.executor.cores",
        "spark.cores.max",
        "spark.task.cpus",
        "spark.executor.resource.gpu.amount",
        "spark.task.resource.gpu.amount",
    )
    now = ", ".join(f"{key}={value}" for key in settings if (value := conf(spark, key)) is not None)
    master, cores = conf(spark, "spark.master") or "", num_tasks * resources.plan.cpus
    if is_local(spark):
        more = f'start the session with master("local[{cores}]")'
    elif master.startswith("spark://"):
        more = f"set spark.cores.max={cores}, and have as many free cores in the cluster's workers"
    else:
        executors = math.ceil(num_tasks / max(1, _in_executor(spark, resources)))
        more = f"set spark.executor.instances={executors} (fewer with more spark.executor.cores)"
    procs = resources.plan.request.procs_per_task
    fewer = f"Ask for fewer ranks, num_proc={slots * procs}, or" if slots else "Ask the cluster for more:"
    asked = f", {resources.plan.request}" if str(resources.plan.request) else ""
    found = f"{num_tasks} slots needed, {slots} available{_amounts_there(spark, num_tasks, resources)}"
    return (
        f"num_proc={num_tasks * procs}{asked}: {found} (master {master}{', ' + now if now else ''}). "
        f"{AT_ONCE} {fewer} {more}."
    )


def _amounts_there(spark: SparkSession, num_tasks: int, resources: TaskResources) -> str:
    """Name the cores and GPUs needed and available, if a slot is more than one core."""
    plan = resources.plan
    texts = []
    executors = 1 if is_local(spark) else spark_private.count_executors(spark)
    if plan.gpus and plan.gpus_there is not None:
        texts.append(f"{num_tasks * plan.gpus:g} GPUs needed, {executors * plan.gpus_there} available")
    if plan.cpus > 1:
        texts.append(f"{num_tasks * plan.cpus} cores needed, {plan.cpus} in one executor for each task")
    return f": {'; '.join(texts)}" if texts else ""
