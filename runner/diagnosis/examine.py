"""``doctor``: checks whether ``run(num_proc=N)`` will work on this Spark application, and if not, says what to do."""

from __future__ import annotations

import logging
import socket
import time
import traceback
import uuid
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from spark_hvd.runner.config import Network, RunConfig
from spark_hvd.runner.diagnosis import probe
from spark_hvd.runner.diagnosis.facts import PROGRAM, HostFacts, StoreTrial
from spark_hvd.runner.diagnosis.gpu_checks import check_gpus
from spark_hvd.runner.diagnosis.host_checks import (
    check_clocks,
    check_packages,
    check_python,
    check_resources,
    check_store,
)
from spark_hvd.runner.diagnosis.jobs import FACTS_SECONDS, NetworkTrial, gather, spark_facts, try_network
from spark_hvd.runner.diagnosis.network import check_driver, check_ranks, clocks_ahead
from spark_hvd.runner.diagnosis.report import Finding, Level, Report, error, ok
from spark_hvd.runner.diagnosis.spark_checks import SparkFacts, check_spark
from spark_hvd.runner.launch.arguments import launcher
from spark_hvd.runner.launch.run import run
from spark_hvd.runner.outcome.errors import ClusterError
from spark_hvd.runner.spark import session as on_spark
from spark_hvd.runner.spark.profiles import ResourceRequest, TaskResources, task_resources

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from spark_hvd.store import Store

_log = logging.getLogger(__name__)
_START_SECONDS = 90.0
_RUN_SECONDS = 90.0
_COLLECTIVE_SECONDS = 30.0
_TASKS_NEED = ("spark_hvd", "zmq", "psutil", "cloudpickle")


@launcher(RunConfig, store="An estimator's store, or its URL; every host writes to it and reads from it.")
def doctor(
    config: RunConfig,
    spark: SparkSession | None = None,
    num_proc: int | None = None,
    *,
    store: str | Store | None = None,
    procs_per_task: int = 1,
    cpus_per_proc: int | None = None,
    gpus_per_proc: int | None = None,
    backend: str | None = None,
    network: Network | None = None,
) -> Report:
    """Examine whether ``run(num_proc=num_proc)`` will work on this Spark application.

    It checks settings, slots and GPUs; Python, packages, memory and disks on the driver and every executor host; the
    connections between hosts; the store; and finally an all-reduce in a run. A check that crashes is reported as a
    finding. Each check has a deadline: a healthy application takes about ten seconds, a broken one at most a few
    minutes. Pass the options that the run will have.

    Returns:
        The report. Print it, or put it on the last line of a notebook cell. ``report.ok`` is False if a run would fail.

    Raises:
        ValueError, TypeError: An argument is wrong.
        ClusterError: There is no session.
    """
    # A session that is passed in may have been stopped, which is a finding rather than an error.
    return _Examination(spark or on_spark.active_session(None), config, store).report()


class _Examination:
    """One examination. Each step adds findings; a step that raises becomes a finding itself."""

    def __init__(self, spark: SparkSession, config: RunConfig, store: str | Store | None) -> None:
        self._spark = spark
        self._config = config
        self._ports = config.port_range
        self._store = None if store is None else _StoreTrials(store)
        self._findings: list[Finding] = []
        self._driver: HostFacts | None = None
        self._hosts: list[HostFacts] = []

    def report(self) -> Report:
        start = time.monotonic()
        config = self._config
        resources: TaskResources | None = self._step("settings", self._task_resources)
        facts: SparkFacts | None = None
        if resources is not None:
            facts = self._step("settings", lambda: spark_facts(self._spark, config.num_tasks, resources))
        if resources is not None and facts is not None:
            self._examine(facts, resources)
        requested = "every slot" if config.num_proc is None else f"num_proc={config.num_proc}"
        master = "an application that does not answer" if facts is None else f"{facts.master}, Spark {facts.version}"
        return Report(f"{requested} on {master}", tuple(self._findings), time.monotonic() - start)

    def _examine(self, facts: SparkFacts, resources: TaskResources) -> None:
        self._add("settings", lambda: check_spark(facts))
        slots = facts.slots or facts.asked or 1
        try:
            self._step("executors", lambda: self._look(facts, slots))
        finally:
            if self._store is not None:
                self._step("store", self._store.clean)
        self._judge_hosts()
        tasks = min(slots, facts.asked or slots)
        if self._can_run(facts):
            where = self._ports, self._config.interfaces
            network = self._step(
                "rank to rank", lambda: try_network(self._spark, tasks, *where, resources, self._findings)
            )
            self._judge_network(facts, tasks, network or NetworkTrial())
            if not any(f.check == "rank to rank" and f.level is Level.ERROR for f in self._findings):
                self._run(tasks * self._config.procs_per_task)

    def _task_resources(self) -> TaskResources:
        """Plan what each task takes; if the application cannot provide that, fall back to its own amounts."""
        config = self._config
        request = ResourceRequest(config.cpus_per_proc, config.gpus_per_proc, config.procs_per_task)
        try:
            return task_resources(self._spark, request)
        except ClusterError as problem:
            found, start_with, settings = str(problem).partition(" Start it with ")
            self._findings.append(error("task resources", found, f"{start_with}{settings}".strip()))
            return task_resources(self._spark, ResourceRequest(procs_per_task=config.procs_per_task))

    def _step(self, check: str, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except Exception as problem:
            _log.debug("the doctor's check of %s crashed", check, exc_info=True)
            last = traceback.extract_tb(problem.__traceback__)[-1]
            text = str(problem).strip().splitlines() or [""]
            found = f"this check crashed: {type(problem).__name__}: {text[0][:400]}"
            where = f"({last.filename}:{last.lineno})"
            self._findings.append(error(check, found, f"A bug in the doctor, or in what it called {where}: report it"))
            return None

    def _add(self, check: str, findings: Callable[[], Iterable[Finding]]) -> None:
        self._step(check, lambda: self._findings.extend(findings()))

    def _look(self, facts: SparkFacts, tasks: int) -> None:
        local_dirs = facts.get("spark.local.dir").split(",") if facts.get("spark.local.dir") else []
        trial = None if self._store is None else self._step("store", self._store.begin)
        self._driver, self._hosts = gather(self._spark, tasks, local_dirs, trial, self._findings)

    def _judge_hosts(self) -> None:
        driver, hosts = self._driver, self._hosts
        if driver is None or not hosts:
            return
        self._add("Python", lambda: check_python(driver, hosts))
        self._add("packages", lambda: check_packages(driver, hosts, self._config.backend))
        store = self._store
        if store is not None:
            trials = {host.name: host.store for host in hosts if host.store is not None}
            self._add("store", lambda: check_store(store.url, store.driver, trials))

    def _can_run(self, facts: SparkFacts) -> bool:
        """Tell whether a barrier stage can start. If not, other findings already say why."""
        incomplete = any(host.packages[name].version is None for host in self._hosts for name in _TASKS_NEED)
        refused = any(f.check == "dynamic allocation" and f.level is Level.ERROR for f in self._findings)
        if facts.slots == 0 or refused or incomplete or not self._hosts:
            self._findings.append(
                Finding("network", Level.WARNING, "not tried: no ranks can start, see above", "Fix the errors first")
            )
            return False
        return True

    def _judge_network(self, facts: SparkFacts, tasks: int, network: NetworkTrial) -> None:
        hosts, config, tasks_reached = self._hosts, self._config, network.tasks
        size = config.num_proc or tasks * config.procs_per_task
        on_host = Counter(task.key for task in tasks_reached)
        for host in hosts:
            ranks = on_host[host.key] * config.procs_per_task
            self._add("resources", partial(check_resources, host, ranks, size))
        self._add("GPUs", lambda: check_gpus(facts, hosts, tasks_reached, config.backend, config.gpus_per_proc))
        if tasks_reached:
            self._add("executor to driver", partial(check_driver, network.driver, tasks_reached, connect=facts.connect))
            self._add("rank to rank", lambda: check_ranks(tasks_reached, self._ports))
            self._add("clock", lambda: check_clocks(clocks_ahead(tasks_reached, network.during)))

    def _run(self, ranks: int) -> None:
        """All-reduce in an ordinary run, and on GPUs in a second one, so that each can fail with its own error."""
        torch = [host.packages["torch"] for host in self._hosts]
        if any(package.version is None for package in torch):
            return
        cuda = all(package.detail["devices"] and package.detail["nccl"] for package in torch)
        for device in ["cpu", "cuda"] if cuda else ["cpu"]:
            self._step("all-reduce", partial(self._reduce, ranks, device))

    def _reduce(self, ranks: int, device: str) -> None:
        config, start = self._config, time.monotonic()
        network = Network(
            interfaces=config.interfaces, ports=config.ports, mpi=config.mpi, collective_timeout=_COLLECTIVE_SECONDS
        )
        what = f"{ranks} ranks{f' over {config.backend}' if config.backend else ''}, tensors on {device}"
        try:
            run(
                all_reduced,
                args=(device,),
                num_proc=ranks,
                spark=self._spark,
                backend=config.backend,
                procs_per_task=config.procs_per_task,
                cpus_per_proc=config.cpus_per_proc,
                gpus_per_proc=config.gpus_per_proc,
                start_timeout=_START_SECONDS,
                timeout=_RUN_SECONDS,
                verbose=0,
                network=network,
            )
            seconds = time.monotonic() - start
            self._findings.append(ok("all-reduce", f"{what}: the sum is correct; the run took {seconds:.1f} s"))
        except Exception as problem:
            first = (str(problem).strip().splitlines() or [""])[0][:600]
            remedy = f"spark_hvd.run(lambda: 1, num_proc={ranks})   # shows the full error"
            self._findings.append(error("all-reduce", f"{what}: {type(problem).__name__}: {first}", remedy))


def all_reduced(device: str) -> None:
    """All-reduce in the ranks of a run.

    Raises:
        RuntimeError: The sum is wrong.
    """
    import torch

    import spark_hvd.torch as hvd

    total = hvd.allreduce(torch.ones(1 << 18, device=device), op=hvd.Sum)
    if not bool((total == hvd.size()).all()):
        raise RuntimeError(f"rank {hvd.rank()} got {total.max().item()} for the sum of ones over {hvd.size()} ranks")


class _StoreTrials:
    """Tries the store, first on the driver; it leaves a file that every host then looks for."""

    def __init__(self, store: str | Store) -> None:
        self.url = store if isinstance(store, str) else store.url
        options = {} if isinstance(store, str) else dict(store.storage_options)
        folder = f".spark_hvd-doctor-{uuid.uuid4().hex[:12]}"
        self._place: dict[str, Any] = {"url": self.url, "options": options, "folder": folder}
        self.driver = StoreTrial()

    def _arguments(self, name: str, expect: str | None, leave: bool) -> dict[str, Any]:
        return {**self._place, "name": name, "expect": expect, "leave": leave}

    def begin(self) -> dict[str, Any] | None:
        """Try the store here, and return the arguments for the hosts' trials; None if this one failed."""
        answer = probe.ask(PROGRAM, {"store": self._arguments("driver", None, True)}, FACTS_SECONDS)
        self.driver = StoreTrial(**answer["store"]) if "store" in answer else StoreTrial("answer", answer["error"])
        if self.driver.failed_step is not None:
            return None
        return self._arguments(socket.gethostname(), "driver", False)

    def clean(self) -> None:
        """Remove every file that the trials have left."""
        probe.ask(PROGRAM, {"clean": {**self._place, "remove_root": self.driver.existed is False}}, FACTS_SECONDS)
