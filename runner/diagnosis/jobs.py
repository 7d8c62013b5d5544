"""The doctor's Spark jobs, which collect facts from every host and test connections. None may hang, and none raises."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import pickle
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from spark_hvd.runner.channel.hub import Hub
from spark_hvd.runner.channel.state import HubState
from spark_hvd.runner.diagnosis import probe
from spark_hvd.runner.diagnosis.facts import PACKAGES, PROGRAM, HostFacts
from spark_hvd.runner.diagnosis.network import NetworkPlan, TaskNetwork
from spark_hvd.runner.diagnosis.report import Finding, error, warning
from spark_hvd.runner.diagnosis.spark_checks import SETTINGS, SparkFacts
from spark_hvd.runner.launch.attempt import open_hub
from spark_hvd.runner.outcome.errors import ClusterError, NotEnoughSlotsError
from spark_hvd.runner.outcome.rows import from_rows
from spark_hvd.runner.spark import session as on_spark
from spark_hvd.runner.spark.entry import task_of
from spark_hvd.runner.spark.errors import translate
from spark_hvd.runner.spark.job import TaskJob
from spark_hvd.runner.spark.profiles import TaskResources
from spark_hvd.runner.spark.slots import task_slots, wait_for_slots
from spark_hvd.world.ports import PortRange

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FACTS_SECONDS = 60.0
"""Time limit for all imports on a host together, and another for its trial of the store."""
_MAX_TASKS = 2000
_GATHER_SECONDS = 180.0
_NETWORK_SECONDS = 60.0


def spark_facts(spark: SparkSession, asked: int | None, resources: TaskResources) -> SparkFacts:
    """Collect what the driver knows about the application; wait some seconds for executors that still register."""
    import pyspark

    shortage, counted = "", None
    try:
        counted = wait_for_slots(spark, asked, 20.0, resources)
    except NotEnoughSlotsError as problem:
        shortage = str(problem)
    except ClusterError:  # a Spark Connect server that does not say how many slots it has
        pass
    connect, slots = on_spark.is_connect(spark), task_slots(spark, resources)
    if slots is None and asked is None:
        slots = counted
    settings = {key: value for key in SETTINGS if (value := on_spark.conf(spark, key)) is not None}
    return SparkFacts(
        version=spark.version,
        pyspark=(pyspark.__version__, os.path.dirname(pyspark.__file__ or "")),
        installed=tuple(_installed()),
        master=settings.get("spark.master", "Spark Connect" if connect else "unknown"),
        local=on_spark.is_local(spark),
        connect=connect,
        slots=slots,
        asked=asked,
        lacking=shortage,
        procs_per_task=resources.plan.request.procs_per_task,
        task_cpus=resources.plan.cpus,
        busy=on_spark.busy_tasks(spark),
        result_bytes=on_spark.max_result_bytes(spark),
        settings=settings,
    )


def _installed() -> Iterator[str]:
    for name in ("pyspark", "pyspark-client", "databricks-connect"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield f"{name} {importlib.metadata.version(name)}"


def gather(
    spark: SparkSession, tasks: int, local_dirs: list[str], store: dict[str, Any] | None, problems: list[Finding]
) -> tuple[HostFacts | None, list[HostFacts]]:
    """Collect facts about this machine and every host in an ordinary job, which works even with too few slots.

    Returns:
        The facts about this machine, or None if there are none, and those about the executors' hosts.
    """
    name = f"spark_hvd-doctor-{uuid.uuid4().hex[:12]}"
    arguments: dict[str, Any] = {"packages": PACKAGES, "dirs": local_dirs}
    task = _facts_task(PROGRAM, {**arguments, "claim": name} | ({} if store is None else {"store": store}))
    job = TaskJob(spark, min(tasks, _MAX_TASKS), task, "spark_hvd.doctor: facts of every host", name, barrier=False)
    here = probe.ask(PROGRAM, arguments, FACTS_SECONDS)
    if "error" in here:
        problems.append(error("driver", here["error"]))
    if not _ended(job, _GATHER_SECONDS):
        problem = f"the executors did not answer in {_GATHER_SECONDS:.0f} s: other jobs hold the slots, or a host hangs"
        problems.append(error("executors", problem, "See the Executors page of the Spark UI"))
    elif job.error is not None:
        problems.append(_failed("executors", job.error, tasks))
    hosts: dict[str, HostFacts] = {}
    for host, answer in (json.loads(row[3]) for row in job.rows):
        if "error" in answer:
            problems.append(error("executors", f"{host}: {answer['error']}"))
        elif answer:
            hosts.setdefault(answer["key"], HostFacts.of(answer))
    return None if "error" in here else HostFacts.of(here), list(hosts.values())


def _facts_task(program: str, asked: dict[str, Any]) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Return the task as a nested function that holds the program's text, so that it runs without spark_hvd."""
    seconds = FACTS_SECONDS

    def spark_hvd_doctor_task(batches: Iterator[Any]) -> Iterator[Any]:
        import json
        import os
        import socket

        import pyarrow
        from pyspark import TaskContext

        for _ in batches:
            pass
        context = TaskContext.get()
        partition = 0 if context is None else context.partitionId()
        try:
            dirs = os.environ.get("LOCAL_DIRS", os.environ.get("SPARK_LOCAL_DIRS", "")).split(",")
            mine = {**asked, "dirs": [*asked["dirs"], *dirs]}
            if "store" in asked:
                mine["store"] = {**asked["store"], "name": f"{socket.gethostname()}-{partition}"}
            module: dict[str, Any] = {"__name__": "spark_hvd_doctor"}
            exec(program, module)
            answer = module["ask"](program, mine, seconds)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        yield pyarrow.RecordBatch.from_arrays(
            [
                pyarrow.array([partition], pyarrow.int32()),
                pyarrow.array([True]),
                pyarrow.array([0], pyarrow.int32()),
                pyarrow.array([json.dumps([socket.gethostname(), answer]).encode()], pyarrow.binary()),
            ],
            names=["rank", "ok", "part", "chunk"],
        )

    return spark_hvd_doctor_task


@dataclass
class NetworkTrial:
    """The connections that were tried.

    ``driver`` is the address on which the driver listened, if it could. ``during`` is the driver's time at the start
    and at the end of the job, in seconds since the epoch.
    """

    driver: tuple[str, int] | None = None
    tasks: list[TaskNetwork] = field(default_factory=list)
    during: tuple[float, float] = (0.0, 0.0)


def try_network(
    spark: SparkSession,
    tasks: int,
    ports: PortRange | None,
    interfaces: Sequence[str],
    resources: TaskResources,
    problems: list[Finding],
) -> NetworkTrial:
    """Let the tasks of a barrier stage connect to the driver and to each other, and add failures to ``problems``."""
    network = NetworkTrial()
    with contextlib.ExitStack() as closing:
        address = None
        try:
            hub = open_hub(spark, lambda bind, public: Hub(HubState(tasks), bind, public, ports=ports))
            closing.callback(hub.close)
            address = hub.address
            network.driver = address.host, address.port
        except ClusterError as exception:
            problems.append(warning("executor to driver", str(exception), ""))
        name = f"spark_hvd-doctor-{uuid.uuid4().hex[:12]}"
        plan = pickle.dumps(NetworkPlan(address, ports, tuple(interfaces)))
        task = task_of("diagnosis.network", "run_network_task", plan, b"")
        description = f"spark_hvd.doctor: network of {tasks} tasks"
        start = time.time()
        job = TaskJob(spark, tasks, task, description, name, resources.profile)
        if not _ended(job, _NETWORK_SECONDS):
            problem = f"{tasks} tasks did not start together, or did not end, in {_NETWORK_SECONDS:.0f} s"
            remedy = (
                "See the Stages page of the Spark UI. Other jobs may hold the slots, or tasks may hang because "
                "executors, which fetch broadcast data from each other, cannot reach each other"
            )
            problems.append(error("rank to rank", problem, remedy))
        elif job.error is not None:
            problems.append(_failed("rank to rank", job.error, tasks))
        network.during = start, time.time()
    network.tasks = [pickle.loads(each.data) for each in from_rows(job.rows)]
    return network


def _failed(check: str, problem: Exception, tasks: int) -> Finding:
    """Return a finding with the message that a run would give for a failed job."""
    return error(check, str(translate(problem, tasks))[:600], "See the log of the executor")


def _ended(job: TaskJob, seconds: float) -> bool:
    """Wait for a job to end, cancel it after ``seconds``, and tell whether it ended by itself."""
    try:
        job.wait(seconds)
    finally:  # also when the user interrupts
        if running := job.running:
            job.cancel()
            job.wait(10)
    return not running
