"""How many cores and GPUs a task of a run gets: the application's amounts, or a task-only resource profile of Spark's.

`plan` decides, from settings alone. `task_resources` reads the settings of a session and makes the profile. A profile
that asks for other executors needs dynamic allocation, with which Spark runs no barrier stage; one that only changes
what a task takes from the executors there are works on every cluster manager, but not in local mode.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spark_hvd.runner.outcome.errors import ClusterError
from spark_hvd.runner.spark.private import known_profile
from spark_hvd.runner.spark.session import conf, is_connect, is_local

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile
    from pyspark.sql import SparkSession

_MANAGERS = ("spark://", "local-cluster", "yarn", "k8s://")
"""Masters on which Spark takes task-only profiles without dynamic allocation."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What a run was asked for.

    Attributes:
        cpus_per_proc: Cores of a rank; None for what the application gives.
        gpus_per_proc: GPUs of a rank, 0 for none; None for what the application gives.
        procs_per_task: Ranks in one task, which needs as many times as much.
    """

    cpus_per_proc: int | None = None
    gpus_per_proc: int | None = None
    procs_per_task: int = 1

    @property
    def cpus(self) -> int | None:
        """Cores of a task."""
        return None if self.cpus_per_proc is None else self.cpus_per_proc * self.procs_per_task

    @property
    def gpus(self) -> int | None:
        """GPUs of a task."""
        return None if self.gpus_per_proc is None else self.gpus_per_proc * self.procs_per_task

    def __str__(self) -> str:
        named = {"cpus_per_proc": self.cpus_per_proc, "gpus_per_proc": self.gpus_per_proc}
        if self.procs_per_task > 1:
            named["procs_per_task"] = self.procs_per_task
        return ", ".join(f"{name}={value}" for name, value in named.items() if value is not None)


@dataclass(frozen=True, slots=True)
class Application:
    """The settings of an application that decide what its tasks can have.

    Attributes:
        master: ``spark.master``; empty where it is not known.
        takes_profiles: Whether this PySpark can give a profile to a barrier stage of Arrow batches (from 4.0 on).
        task_cpus: ``spark.task.cpus``.
        task_gpus: ``spark.task.resource.gpu.amount``; None: Spark schedules no GPUs for tasks.
        executor_cores: ``spark.executor.cores``; None: all cores that a worker has.
        executor_gpus: ``spark.executor.resource.gpu.amount``; None: executors have no GPUs that Spark knows of.
        driver_gpus: In local mode the driver's, if it has discovered any.
    """

    master: str = ""
    takes_profiles: bool = True
    task_cpus: int = 1
    task_gpus: float | None = None
    executor_cores: int | None = None
    executor_gpus: int | None = None
    driver_gpus: int | None = None

    @property
    def is_local(self) -> bool:
        """Whether all tasks run in the driver's own JVM."""
        return self.master == "local" or self.master.startswith("local[")


@dataclass(frozen=True, slots=True)
class Plan:
    """What each task of a run takes.

    Attributes:
        ask: What it follows from.
        cpus: Cores of a task.
        gpus: GPUs of a task; a fraction where several tasks share one. None: Spark hands out none.
        needs_profile: Whether the application's own amounts are others.
        gpus_there: GPUs that an executor has (in local mode: this machine), if Spark knows.
    """

    ask: Ask
    cpus: int
    gpus: float | None
    needs_profile: bool
    gpus_there: int | None

    @property
    def may_share(self) -> bool:
        """Whether there are meant to be more ranks than GPUs."""
        return self.gpus is not None and 0 < self.gpus < self.ask.procs_per_task


def plan(app: Application, ask: Ask) -> Plan:
    """Decide what tasks take, and whether that needs a profile.

    Raises:
        ClusterError: this application cannot give it; the message has the settings that would.
    """
    cpus = app.task_cpus if ask.cpus is None else ask.cpus
    gpus = app.task_gpus if ask.gpus is None else float(ask.gpus)
    if app.is_local:
        # Spark has cores only here, and counts those of a task by its own setting; task_slots() counts the larger.
        return Plan(ask, max(cpus, app.task_cpus), gpus, False, app.driver_gpus)
    if ask.gpus and not app.executor_gpus:
        raise ClusterError(
            f"{ask}: the executors of this application have no GPUs that Spark knows of "
            f"(spark.executor.resource.gpu.amount is not set). {_start_with(app, ask)}"
        )
    if ask.gpus and app.executor_gpus and ask.gpus > app.executor_gpus:
        raise ClusterError(
            f"{ask}: a task needs {ask.gpus} GPUs, and an executor has {app.executor_gpus} "
            f"(spark.executor.resource.gpu.amount). Ask for fewer GPUs a task, or start the application with larger "
            "executors."
        )
    if ask.cpus and app.executor_cores and ask.cpus > app.executor_cores:
        raise ClusterError(
            f"{ask}: a task needs {ask.cpus} cores, and an executor has {app.executor_cores} (spark.executor.cores). "
            "Ask for fewer cores a task, or start the application with larger executors."
        )
    as_it_is = cpus == app.task_cpus and (gpus or 0) == (app.task_gpus or 0)
    if not as_it_is:
        _require_profiles(app, ask)
    return Plan(ask, cpus, gpus, not as_it_is, app.executor_gpus)


def _require_profiles(app: Application, ask: Ask) -> None:
    if not app.takes_profiles:
        raise ClusterError(
            f"{ask}: this application's tasks get {_amounts(app)}, and before PySpark 4.0 that cannot be changed for "
            f"one barrier stage. {_start_with(app, ask)}"
        )
    if app.master and not app.master.startswith(_MANAGERS):
        raise ClusterError(
            f"{ask}: this application's tasks get {_amounts(app)}, and Spark changes that for one stage on YARN, "
            f"Kubernetes and standalone clusters only, not with master {app.master}. {_start_with(app, ask)}"
        )


def _amounts(app: Application) -> str:
    gpus = "no GPU" if app.task_gpus is None else f"{app.task_gpus:g} GPUs"
    return f"{app.task_cpus} cores and {gpus} (spark.task.cpus, spark.task.resource.gpu.amount)"


def _start_with(app: Application, ask: Ask) -> str:
    settings = []
    if ask.cpus is not None and ask.cpus != app.task_cpus:
        settings.append(f"spark.task.cpus={ask.cpus}")
    if ask.gpus is not None and ask.gpus != (app.task_gpus or 0):
        if not app.executor_gpus:
            settings.append(f"spark.executor.resource.gpu.amount={ask.gpus}")
            settings.append("spark.executor.resource.gpu.discoveryScript=<a script that lists the GPUs of a host>")
        settings.append(f"spark.task.resource.gpu.amount={ask.gpus}")
    return f"Start it with {', '.join(settings)} (see docs/gpus.md)."


@dataclass(frozen=True, slots=True)
class TaskResources:
    """A plan, and the profile that carries it out where one is needed."""

    plan: Plan
    profile: ResourceProfile | None = None


def task_resources(spark: SparkSession, ask: Ask) -> TaskResources:
    """Plan for a session, and make the profile.

    Raises:
        ClusterError: see :func:`plan`.
    """
    made = plan(_application(spark), ask)
    return TaskResources(made, _profile(spark, made) if made.needs_profile else None)


def _application(spark: SparkSession) -> Application:
    gpus = conf(spark, "spark.task.resource.gpu.amount")
    local = is_local(spark)
    return Application(
        master=conf(spark, "spark.master") or "",
        takes_profiles="profile" in inspect.signature(type(spark.range(0)).mapInArrow).parameters,
        task_cpus=int(conf(spark, "spark.task.cpus") or 1),
        task_gpus=None if gpus is None else float(gpus),
        executor_cores=_whole(conf(spark, "spark.executor.cores")),
        executor_gpus=_whole(conf(spark, "spark.executor.resource.gpu.amount")),
        driver_gpus=_whole(conf(spark, "spark.driver.resource.gpu.amount")) if local else None,
    )


def _whole(setting: str | None) -> int | None:
    return None if setting is None else int(setting)


def _profile(spark: SparkSession, made: Plan) -> ResourceProfile:
    from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests

    wanted = TaskResourceRequests().cpus(made.cpus)
    if made.gpus:
        wanted = wanted.resource("gpu", made.gpus)
    built = ResourceProfileBuilder().require(wanted).build
    return built if is_connect(spark) else known_profile(spark, built)
