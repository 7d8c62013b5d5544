"""How many cores and GPUs a task gets: the application's amounts, or those of a task-only resource profile.

`plan` decides from settings alone. `task_resources` reads a session's settings and makes the profile. A profile for
other executors needs dynamic allocation, which rules out barrier stages. A task-only profile changes only what a task
takes from existing executors; it works on every cluster manager, but not in local mode.
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
class ResourceRequest:
    """The resources that the user asked for.

    Attributes:
        cpus_per_proc: Cores per rank; None means the application's amount.
        gpus_per_proc: GPUs per rank; None means the application's amount.
        procs_per_task: Ranks per task. A task needs the resources of all its ranks.
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
        arguments = {"cpus_per_proc": self.cpus_per_proc, "gpus_per_proc": self.gpus_per_proc}
        if self.procs_per_task > 1:
            arguments["procs_per_task"] = self.procs_per_task
        return ", ".join(f"{name}={value}" for name, value in arguments.items() if value is not None)


@dataclass(frozen=True, slots=True)
class Application:
    """The settings of an application that limit what its tasks can get.

    Attributes:
        master: ``spark.master``; empty if unknown.
        takes_profiles: Whether this PySpark accepts a profile for a barrier stage of Arrow batches (4.0 and newer).
        task_cpus: ``spark.task.cpus``.
        task_gpus: ``spark.task.resource.gpu.amount``; None: Spark schedules no GPUs for tasks.
        executor_cores: ``spark.executor.cores``; None: all cores of a worker.
        executor_gpus: ``spark.executor.resource.gpu.amount``; None: Spark knows of no GPUs in executors.
        driver_gpus: In local mode, the GPUs that the driver has discovered.
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
    """The resources that each task of a run takes.

    Attributes:
        request: The request that the plan fulfils.
        cpus: Cores per task.
        gpus: GPUs per task; a fraction if several tasks share one. None: Spark hands out no GPUs.
        needs_profile: Whether the amounts differ from the application's, so that a profile is needed.
        gpus_there: GPUs of an executor (in local mode: of this machine), if Spark knows.
    """

    request: ResourceRequest
    cpus: int
    gpus: float | None
    needs_profile: bool
    gpus_there: int | None

    @property
    def may_share(self) -> bool:
        """Whether several ranks are meant to share a GPU."""
        return self.gpus is not None and 0 < self.gpus < self.request.procs_per_task


def plan(app: Application, request: ResourceRequest) -> Plan:
    """Decide what tasks take, and whether that needs a profile.

    Raises:
        ClusterError: This application cannot provide the resources. The message names the settings that would.
    """
    cpus = app.task_cpus if request.cpus is None else request.cpus
    gpus = app.task_gpus if request.gpus is None else float(request.gpus)
    if app.is_local:
        # In local mode, Spark schedules only cores, spark.task.cpus for each task; task_slots() allows for more.
        return Plan(request, max(cpus, app.task_cpus), gpus, False, app.driver_gpus)
    if request.gpus and not app.executor_gpus:
        raise ClusterError(
            f"{request}: the executors of this application have no GPUs that Spark knows of "
            f"(spark.executor.resource.gpu.amount is not set). {_start_with(app, request)}"
        )
    if request.gpus and app.executor_gpus and request.gpus > app.executor_gpus:
        raise ClusterError(
            f"{request}: a task needs {request.gpus} GPUs, and an executor has {app.executor_gpus} "
            f"(spark.executor.resource.gpu.amount). Ask for fewer GPUs a task, or start the application with larger "
            "executors."
        )
    if request.cpus and app.executor_cores and request.cpus > app.executor_cores:
        raise ClusterError(
            f"{request}: a task needs {request.cpus} cores, and an executor has {app.executor_cores} "
            "(spark.executor.cores). Ask for fewer cores a task, or start the application with larger executors."
        )
    needs_profile = cpus != app.task_cpus or (gpus or 0) != (app.task_gpus or 0)
    if needs_profile:
        _require_profiles(app, request)
    return Plan(request, cpus, gpus, needs_profile, app.executor_gpus)


def _require_profiles(app: Application, request: ResourceRequest) -> None:
    if not app.takes_profiles:
        raise ClusterError(
            f"{request}: this application's tasks get {_amounts(app)}, and before PySpark 4.0 that cannot be changed "
            f"for one barrier stage. {_start_with(app, request)}"
        )
    if app.master and not app.master.startswith(_MANAGERS):
        raise ClusterError(
            f"{request}: this application's tasks get {_amounts(app)}, and Spark changes that for one stage on YARN, "
            f"Kubernetes and standalone clusters only, not with master {app.master}. {_start_with(app, request)}"
        )


def _amounts(app: Application) -> str:
    gpus = "no GPU" if app.task_gpus is None else f"{app.task_gpus:g} GPUs"
    return f"{app.task_cpus} cores and {gpus} (spark.task.cpus, spark.task.resource.gpu.amount)"


def _start_with(app: Application, request: ResourceRequest) -> str:
    settings = []
    if request.cpus is not None and request.cpus != app.task_cpus:
        settings.append(f"spark.task.cpus={request.cpus}")
    if request.gpus is not None and request.gpus != (app.task_gpus or 0):
        if not app.executor_gpus:
            settings.append(f"spark.executor.resource.gpu.amount={request.gpus}")
            settings.append("spark.executor.resource.gpu.discoveryScript=<a script that lists the GPUs of a host>")
        settings.append(f"spark.task.resource.gpu.amount={request.gpus}")
    return f"Start it with {', '.join(settings)} (see docs/gpus.md)."


@dataclass(frozen=True, slots=True)
class TaskResources:
    """A plan, and the profile that carries it out if it needs one."""

    plan: Plan
    profile: ResourceProfile | None = None


def task_resources(spark: SparkSession, request: ResourceRequest) -> TaskResources:
    """Plan for a session, and make the profile if the plan needs one.

    Raises:
        ClusterError: see :func:`plan`.
    """
    made = plan(_application(spark), request)
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
