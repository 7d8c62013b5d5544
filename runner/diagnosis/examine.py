"""``doctor``: whether ``run(num_proc=N)`` will work on this Spark application, and if not, why not and what to do."""

from __future__ import annotations

import logging
import socket
import time
import traceback
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from spark_hvd.runner.config import RunConfig
from spark_hvd.runner.diagnosis import facts as doctor_facts
from spark_hvd.runner.diagnosis.allreduce import Measured, measure
from spark_hvd.runner.diagnosis.facts import HostFacts, StoreTrial
from spark_hvd.runner.diagnosis.gpu_checks import Assigned, check_gpus
from spark_hvd.runner.diagnosis.host_checks import (
    check_clocks,
    check_packages,
    check_python,
    check_resources,
    check_store,
)
from spark_hvd.runner.diagnosis.jobs import PROBE, Gathered, Ways, gather, spark_facts, try_network
from spark_hvd.runner.diagnosis.network_checks import check_allreduce, check_driver_ways, check_rank_ways
from spark_hvd.runner.diagnosis.report import Finding, Level, Report
from spark_hvd.runner.diagnosis.spark_checks import SparkFacts, check_spark
from spark_hvd.runner.launch.run import run
from spark_hvd.runner.options import launcher
from spark_hvd.runner.outcome.errors import ClusterError
from spark_hvd.runner.spark import session as on_spark
from spark_hvd.runner.spark.profiles import Ask, TaskResources, task_resources

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_log = logging.getLogger(__name__)
_STORE_SECONDS = 30.0
_IMPORT_SECONDS = 60.0
_START_SECONDS = 90.0
_COLLECTIVE_SECONDS = 30.0
_TASKS_NEED = ("spark_hvd", "zmq", "psutil", "cloudpickle")


class StoreLike(Protocol):
    """What has the URL and fsspec options of a store, as ``spark_hvd.estimators.Store`` does."""

    @property
    def url(self) -> str: ...  # noqa: D102

    @property
    def storage_options(self) -> Mapping[str, Any]: ...  # noqa: D102


@launcher(
    RunConfig,
    store="The store of an estimator, or its URL: it is written and read on every host.",
    seconds="How long all-reduces are timed, for the whole world and again for all pairs of hosts.",
)
def doctor(
    spark: SparkSession | None = None,
    num_proc: int | None = None,
    *,
    store: str | StoreLike | None = None,
    procs_per_task: int = 1,
    cpus_per_proc: int | None = None,
    gpus_per_proc: int | None = None,
    backend: str | None = None,
    interfaces: Sequence[str] = (),
    ports: str | None = None,
    seconds: float = 3.0,
) -> Report:
    """Examine whether ``run(num_proc=num_proc)`` will work on this Spark application.

    Settings, slots, GPUs; Python, packages, memory and disks on the driver and every executor host; who can connect to
    whom; the store; and how fast the ranks all-reduce. A check that breaks is a finding of its own, and none waits
    without end: an application that is well takes about ten seconds, a sick one some minutes at most. Give the options
    that the run will have.

    Returns:
        The report: print it, or leave it as the last line of a notebook cell. ``report.ok`` is False if a run fails.

    Raises:
        ValueError, TypeError: an argument is wrong.
        ClusterError: there is no session.
    """
    config = RunConfig.of(locals())
    if not seconds > 0:
        raise ValueError(f"seconds={seconds!r}: expected a number above 0")
    # A session that was stopped is a finding, too.
    return _Examination(spark or on_spark.active_session(None), config, store, seconds).report()


class _Examination:
    """One examination: each step looks, and what it sees becomes findings; a step that breaks becomes one itself."""

    def __init__(self, spark: SparkSession, config: RunConfig, store: str | StoreLike | None, seconds: float) -> None:
        self._spark = spark
        self._config = config
        self._ports = config.port_range
        self._seconds = seconds
        self._store = None if store is None else _StoreTrials(store)
        self._findings: list[Finding] = []
        self._driver: HostFacts | None = None
        self._gathered = Gathered()
        self._ways = Ways()

    def report(self) -> Report:
        start = time.monotonic()
        config = self._config
        resources: TaskResources | None = self._step("settings", self._task_resources)
        facts: SparkFacts | None = None
        if resources is not None:
            facts = self._step("settings", lambda: spark_facts(self._spark, config.num_tasks, resources))
        if resources is not None and facts is not None:
            self._examine(facts, resources)
        asked = "every slot" if config.num_proc is None else f"num_proc={config.num_proc}"
        master = "an application that does not answer" if facts is None else f"{facts.master}, Spark {facts.version}"
        return Report(f"{asked} on {master}", tuple(self._findings), time.monotonic() - start)

    def _examine(self, facts: SparkFacts, resources: TaskResources) -> None:
        self._add("settings", lambda: check_spark(facts))
        there = facts.slots or facts.asked or 1
        try:
            self._step("executors", lambda: self._look(facts, there))
        finally:
            if self._store is not None:
                self._step("store", self._store.clean)
        self._judge_hosts()
        tasks = min(there, facts.asked or there)
        if self._can_run(facts):
            interfaces = self._config.interfaces
            ways = self._step(
                "rank to rank", lambda: try_network(self._spark, tasks, self._ports, interfaces, resources)
            )
            self._ways = ways or Ways()
            self._findings += self._ways.problems
            self._judge_network(facts, tasks)
            if not any(f.check == "rank to rank" and f.level is Level.ERROR for f in self._findings):
                self._reduce(tasks * self._config.procs_per_task)

    def _task_resources(self) -> TaskResources:
        """What each task takes; where the application cannot give that, what it gives by itself."""
        config = self._config
        ask = Ask(config.cpus_per_proc, config.gpus_per_proc, config.procs_per_task)
        try:
            return task_resources(self._spark, ask)
        except ClusterError as error:
            found, verb, remedy = str(error).partition(" Start it with ")
            self._findings.append(Finding("task resources", Level.ERROR, found, f"{verb}{remedy}".strip()))
            return task_resources(self._spark, Ask(procs_per_task=config.procs_per_task))

    def _step(self, check: str, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except Exception as error:
            _log.debug("the doctor's check of %s broke", check, exc_info=True)
            last = traceback.extract_tb(error.__traceback__)[-1]
            text = str(error).strip().splitlines() or [""]
            self._findings.append(
                Finding(
                    check,
                    Level.ERROR,
                    f"this check broke: {type(error).__name__}: {text[0][:400]}",
                    f"A defect of the doctor, or of what it met ({last.filename}:{last.lineno}); please report it",
                )
            )
            return None

    def _add(self, check: str, findings: Callable[[], Iterable[Finding]]) -> None:
        self._step(check, lambda: self._findings.extend(findings()))

    def _look(self, facts: SparkFacts, tasks: int) -> None:
        dirs = facts.get("spark.local.dir").split(",") if facts.get("spark.local.dir") else []
        trial = None if self._store is None else self._step("store", self._store.begin)

        def look_here() -> None:
            self._driver = doctor_facts.look(PROBE, dirs, seconds=_IMPORT_SECONDS)

        self._gathered = gather(self._spark, tasks, dirs, trial, look_here)
        self._findings += self._gathered.problems

    def _judge_hosts(self) -> None:
        driver, hosts = self._driver, self._gathered.hosts
        if driver is None or not hosts:
            return
        self._add("Python", lambda: check_python(driver, hosts))
        self._add("packages", lambda: check_packages(driver, hosts, self._config.backend))
        store = self._store
        if store is not None:
            trials = {host.name: host.store for host in hosts if host.store is not None}
            self._add("store", lambda: check_store(store.url, store.driver, trials))

    def _can_run(self, facts: SparkFacts) -> bool:
        """Whether it makes sense to start a barrier stage; what would stop one is among the findings already."""
        lacking = any(host.packages[name].version is None for host in self._gathered.hosts for name in _TASKS_NEED)
        refused = any(f.check == "dynamic allocation" and f.level is Level.ERROR for f in self._findings)
        if facts.slots == 0 or refused or lacking or not self._gathered.hosts:
            self._findings.append(
                Finding("network", Level.WARNING, "not tried: no ranks can start, see above", "Mend the errors first")
            )
            return False
        return True

    def _judge_network(self, facts: SparkFacts, tasks: int) -> None:
        ways, hosts, config = self._ways, self._gathered.hosts, self._config
        size = config.num_proc or tasks * config.procs_per_task
        on_host = Counter(task.key for task in ways.tasks)
        for host in hosts:
            ranks = on_host[host.key] * config.procs_per_task
            self._add("resources", partial(check_resources, host, ranks, size))
        assigned = [Assigned(task.partition, task.key, task.name, task.gpus) for task in ways.tasks]
        self._add("GPUs", lambda: check_gpus(facts, hosts, assigned, config.backend, config.gpus_per_proc))
        if ways.tasks:
            way = partial(check_driver_ways, ways.driver, ways.tasks, ways.silent, connect=facts.connect)
            self._add("executor to driver", way)
            self._add("rank to rank", lambda: check_rank_ways(ways.tasks, self._ports))
            ahead = {t.name: t.driver.ahead for t in ways.tasks if t.driver is not None and t.driver.error is None}
            self._add("clock", lambda: check_clocks(ahead))

    def _reduce(self, ranks: int) -> None:
        """Time all-reduces in runs like any other; NCCL in one of its own, so that its failure takes nothing along."""
        torch = [host.packages["torch"] for host in self._gathered.hosts]
        if any(package.version is None for package in torch):
            return
        cuda = all(package.detail["devices"] and package.detail["nccl"] for package in torch)
        transports = [self._config.backend] if self._config.backend else ["gloo", "nccl"] if cuda else ["gloo"]
        for transport in transports:
            self._add("all-reduce", lambda: check_allreduce(self._measured(ranks, transport)))  # noqa: B023 - called now

    def _measured(self, ranks: int, transport: str) -> list[Measured]:
        config = self._config
        try:
            return run(
                measure,
                args=(self._seconds, transport),
                num_proc=ranks,
                spark=self._spark,
                backend=config.backend,
                procs_per_task=config.procs_per_task,
                cpus_per_proc=config.cpus_per_proc,
                gpus_per_proc=config.gpus_per_proc,
                interfaces=config.interfaces,
                ports=config.ports,
                start_timeout=_START_SECONDS,
                timeout=10 * self._seconds + 60,
                collective_timeout=_COLLECTIVE_SECONDS,
                verbose=0,
            )[0]
        except Exception as error:
            first = (str(error).strip().splitlines() or [""])[0][:600]
            self._findings.append(
                Finding(
                    "all-reduce",
                    Level.ERROR,
                    f"{ranks} ranks over {transport}: {type(error).__name__}: {first}",
                    f"spark_hvd.run(lambda: 1, num_proc={ranks})   # shows the whole error",
                )
            )
            return []


class _StoreTrials:
    """The store tried on the driver first, whose file every host then looks for."""

    def __init__(self, store: str | StoreLike) -> None:
        self.url = store if isinstance(store, str) else store.url
        options = {} if isinstance(store, str) else dict(store.storage_options)
        folder = f".spark_hvd-doctor-{uuid.uuid4().hex[:12]}"
        self._place: dict[str, Any] = {"url": self.url, "options": options, "folder": folder}
        self.driver = StoreTrial()

    def _arguments(self, name: str, expect: str | None, leave: bool) -> dict[str, Any]:
        return {**self._place, "name": name, "expect": expect, "leave": leave}

    def begin(self) -> dict[str, Any] | None:
        """Try it here; returns what hosts are to do, or None if there is no use."""
        self.driver = doctor_facts.try_store(PROBE, self._arguments("driver", None, True), _STORE_SECONDS)
        if self.driver.failed_step is not None:
            return None
        return self._arguments(socket.gethostname(), "driver", False)

    def clean(self) -> None:
        """Remove everything that the trials have left."""
        if self.driver.existed is not None:
            doctor_facts.clean_store(PROBE, {**self._place, "existed": self.driver.existed}, _STORE_SECONDS)
