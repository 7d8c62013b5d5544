"""The doctor's Spark jobs: facts from every slot, then who can connect to whom. None may hang, and none raises."""

from __future__ import annotations

import contextlib
import json
import pickle
import secrets
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spark_hvd.runner.diagnosis import facts as doctor_facts
from spark_hvd.runner.diagnosis import probe as doctor_probe
from spark_hvd.runner.diagnosis.facts import HostFacts, facts_from_json
from spark_hvd.runner.diagnosis.network import CONNECT_SECONDS, TOKEN_BYTES, EchoServer, NetworkPlan, TaskNetwork
from spark_hvd.runner.diagnosis.report import Finding, error, warning
from spark_hvd.runner.diagnosis.spark_checks import SETTINGS, SparkFacts, explain_job_failure
from spark_hvd.runner.outcome.errors import NotEnoughSlotsError
from spark_hvd.runner.outcome.rows import from_rows
from spark_hvd.runner.spark import session as on_spark
from spark_hvd.runner.spark.entry import task_of
from spark_hvd.runner.spark.job import TaskJob
from spark_hvd.runner.spark.profiles import TaskResources
from spark_hvd.runner.spark.reach import unanswered
from spark_hvd.runner.spark.slots import task_slots, wait_for_slots
from spark_hvd.world.ports import PortRange

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PROBE = Path(doctor_probe.__file__).read_text()
_FACTS = Path(doctor_facts.__file__).read_text()
_MOST_TASKS = 2000
_IMPORT_SECONDS = 60.0
_FACTS_SECONDS = 180.0
_NETWORK_SECONDS = 60.0


def spark_facts(spark: SparkSession, asked: int | None, resources: TaskResources) -> SparkFacts:
    """What the driver knows of the application; waits some seconds for executors that are still registering.

    Args:
        spark: The session.
        asked: Tasks wanted; None for every slot.
        resources: What each of them takes.
    """
    if asked is not None:
        with contextlib.suppress(NotEnoughSlotsError):
            wait_for_slots(spark, asked, 20.0, resources)
    connect = on_spark.is_connect(spark)
    settings = {key: value for key in SETTINGS if (value := on_spark.conf(spark, key)) is not None}
    return SparkFacts(
        version=spark.version,
        master=settings.get("spark.master", "Spark Connect" if connect else "unknown"),
        local=on_spark.is_local(spark),
        connect=connect,
        slots=task_slots(spark, resources),
        asked=asked,
        procs_per_task=resources.plan.ask.procs_per_task,
        task_cpus=resources.plan.cpus,
        busy=on_spark.busy_tasks(spark),
        result_bytes=on_spark.max_result_bytes(spark),
        settings=settings,
    )


@dataclass
class Gathered:
    """What came back from the executors, and what went wrong on the way."""

    hosts: list[HostFacts] = field(default_factory=list)
    problems: list[Finding] = field(default_factory=list)


def gather(
    spark: SparkSession,
    tasks: int,
    local_dirs: Sequence[str],
    store: dict[str, Any] | None,
    meanwhile: Callable[[], None],
) -> Gathered:
    """Facts of every host, by an ordinary job: it needs no barrier, and works with too few slots.

    Args:
        spark: The session.
        tasks: How many, so that every executor gets one.
        local_dirs: Directories whose disks matter.
        store: Arguments of the trial of the store.
        meanwhile: Called while the job runs.
    """
    name = f"spark_hvd-doctor-{uuid.uuid4().hex[:12]}"
    task = _facts_task(_FACTS, PROBE, name, list(local_dirs), store, _IMPORT_SECONDS)
    job = TaskJob(spark, min(tasks, _MOST_TASKS), task, "spark_hvd.doctor: facts of every host", name, barrier=False)
    meanwhile()
    found = Gathered()
    if not _ended(job, _FACTS_SECONDS):
        problem = f"the executors did not answer in {_FACTS_SECONDS:.0f} s: other jobs hold the slots, or a host hangs"
        found.problems.append(error("executors", problem, "See the Executors page of the Spark UI"))
    elif job.error is not None:
        found.problems.append(explain_job_failure("executors", str(job.error)))
    keys: set[str] = set()
    for data in (json.loads(row[3]) for row in job.rows):
        if "error" in data:
            found.problems.append(error("executors", f"{data['name']}: {data['error']}"))
        elif data["facts"] is not None and data["facts"]["key"] not in keys:
            keys.add(data["facts"]["key"])
            found.hosts.append(facts_from_json(data["facts"]))
    return found


def _facts_task(
    facts: str, probe: str, claim: str, local_dirs: list[str], store: dict[str, Any] | None, seconds: float
) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """The task as a nested function, with the programs as text: it runs where no spark_hvd is installed."""

    def spark_hvd_doctor_task(batches: Iterator[Any]) -> Iterator[Any]:
        import dataclasses
        import json
        import os
        import socket
        import sys
        import types

        import pyarrow
        from pyspark import TaskContext

        for _ in batches:
            pass
        context = TaskContext.get()
        partition = 0 if context is None else context.partitionId()
        said: dict[str, Any] = {"name": socket.gethostname()}
        try:
            module = sys.modules["spark_hvd_doctor_facts"] = types.ModuleType("spark_hvd_doctor_facts")
            exec(compile(facts, "doctor_facts.py", "exec"), module.__dict__)
            first = module.FirstOnHost(claim)
            dirs = local_dirs + os.environ.get("LOCAL_DIRS", os.environ.get("SPARK_LOCAL_DIRS", "")).split(",")
            trial = None if store is None else {**store, "name": f"{socket.gethostname()}-{partition}"}
            said["facts"] = dataclasses.asdict(module.look(probe, dirs, trial, seconds)) if first.held else None
            first.release()
        except Exception as error:
            said["error"] = f"{type(error).__name__}: {error}"
        yield pyarrow.RecordBatch.from_arrays(
            [
                pyarrow.array([partition], pyarrow.int32()),
                pyarrow.array([True]),
                pyarrow.array([0], pyarrow.int32()),
                pyarrow.array([json.dumps(said).encode()], pyarrow.binary()),
            ],
            names=["rank", "ok", "part", "chunk"],
        )

    return spark_hvd_doctor_task


@dataclass
class Ways:
    """Who reached whom.

    Attributes:
        driver: Where the driver listened; None where it could not.
        tasks: What the tasks found.
        silent: Hosts whose executors do not answer the driver.
        problems: What went wrong.
    """

    driver: tuple[str, int] | None = None
    tasks: list[TaskNetwork] = field(default_factory=list)
    silent: set[str] = field(default_factory=set)
    problems: list[Finding] = field(default_factory=list)


def try_network(
    spark: SparkSession, tasks: int, ports: PortRange | None, interfaces: Sequence[str], resources: TaskResources
) -> Ways:
    """Let the tasks of one barrier stage connect to the driver and to each other, and the driver to their executors."""
    ways, token = Ways(), secrets.token_bytes(TOKEN_BYTES)
    with contextlib.ExitStack() as closing:
        bind = None
        try:
            public, bind = on_spark.driver_hosts(spark)
            server = EchoServer(on_spark.address_of(bind), ports, token)
            closing.callback(server.close)
            ways.driver = public, server.port
        except OSError as failed:
            where = "" if bind is None else f" on {bind}"
            problem = f"the driver cannot listen{where}: {failed.strerror or failed}"
            remedy = "" if on_spark.is_connect(spark) else "--conf spark.driver.bindAddress=0.0.0.0"
            ways.problems.append(warning("executor to driver", problem, remedy))
        name = f"spark_hvd-doctor-{uuid.uuid4().hex[:12]}"
        plan = pickle.dumps(NetworkPlan(ways.driver, ports, tuple(interfaces), token))
        task = task_of("diagnosis.network", "run_network_task", plan, b"")
        description = f"spark_hvd.doctor: network of {tasks} tasks"
        job = TaskJob(spark, tasks, task, description, name, resources.profile)
        if not _ended(job, _NETWORK_SECONDS):
            problem = f"{tasks} tasks did not start together, or did not end, in {_NETWORK_SECONDS:.0f} s"
            remedy = (
                "See the Stages page of the Spark UI: other jobs may hold the slots, or tasks of this one hang because "
                "executors, which also fetch what a job needs from each other, cannot reach each other"
            )
            ways.problems.append(error("rank to rank", problem, remedy))
        elif job.error is not None:
            ways.problems.append(explain_job_failure("rank to rank", str(job.error)))
    ways.silent = {host for host, _ in unanswered(on_spark.executor_addresses(spark).values(), CONNECT_SECONDS)}
    ways.tasks = [pickle.loads(each.data) for each in from_rows(job.rows)]
    return ways


def _ended(job: TaskJob, seconds: float) -> bool:
    """Wait for a job; one that takes longer is cancelled."""
    try:
        job.wait(seconds)
    finally:  # also when the user interrupts
        if running := job.running:
            job.cancel()
            job.wait(10)
    return not running
