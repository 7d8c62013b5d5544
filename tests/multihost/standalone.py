"""A Spark standalone cluster on hosts: a master on the driver's address and a worker on every host."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pyspark

from spark_hvd.runner.spark.profiles import ResourceRequest, task_resources
from spark_hvd.runner.spark.slots import task_slots
from tests.conftest import start_session, wait_until
from tests.daemons import command_line, end, listens
from tests.jvm import SHORT_LIVED
from tests.multihost.hosts import Host, Hosts, environment

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_HOME = Path(pyspark.__file__).parent
_PORT = 7077
DRIVER_PORTS = {"spark.driver.port": "7078", "spark.driver.blockManager.port": "7079"}
"""Fixed, so that tests can block the hub's ports without blocking Spark's."""


@dataclass(eq=False)
class Cluster:
    """A running cluster.

    Attributes:
        net: Its hosts.
        cores: Task slots of each host.
        folder: A folder for logs and work; all hosts see it.
        session: The application's session.
    """

    net: Hosts
    cores: int
    folder: Path
    workers: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    session: SparkSession = field(init=False)

    @property
    def master(self) -> str:
        """Return the master's URL."""
        return f"spark://{bracketed(self.net.driver)}:{_PORT}"

    def start_worker(self, host: Host) -> None:
        """Start the host's worker daemon; executors start by themselves."""
        work = self.folder / host.name
        env = {
            **_daemon_env(self.net),
            "SPARK_LOCAL_IP": host.address,
            "SPARK_PUBLIC_DNS": host.address,
            "SPARK_WORKER_DIR": str(work),
            "SPARK_LOCAL_DIRS": str(work),
        }
        command = [str(_HOME / "bin/spark-class"), "org.apache.spark.deploy.worker.Worker", "--host"]
        options = [bracketed(host.address), "--webui-port", "0", "-c", str(self.cores), "-m", "1g"]
        self.workers[host.name] = host.start(
            *command, *options, self.master, log=self.folder / f"{host.name}.log", env=env
        )

    def executor(self, host: Host) -> psutil.Process:
        """Return the executor's JVM on a host."""
        return next(
            process for process in self.processes(host) if "CoarseGrainedExecutorBackend" in command_line(process)
        )

    def ranks(self, host: Host) -> list[psutil.Process]:
        """Return the rank processes on a host: those that fork servers have forked there."""
        servers = {process.pid: process for process in self.processes(host) if "forkserver" in command_line(process)}
        return [process for process in servers.values() if process.ppid() in servers]

    def processes(self, host: Host) -> list[psutil.Process]:
        """Return the processes on a host."""
        found = []
        for pid in host.pids():
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(pid))
        return [process for process in found if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]

    def make_whole(self, timeout: float = 60.0) -> None:
        """Undo what a test has broken, and wait until every slot is available again."""
        for host in self.net.hosts:
            self.net.mend(host)
            if self.workers[host.name].poll() is not None:
                self.start_worker(host)
        self.wait_for_slots(len(self.net.hosts) * self.cores, timeout)

    def wait_for_slots(self, wanted: int, timeout: float = 60.0) -> None:
        """Wait until the application has ``wanted`` task slots."""
        deadline = time.monotonic() + timeout
        while (there := task_slots(self.session, task_resources(self.session, ResourceRequest())) or 0) != wanted:
            if time.monotonic() > deadline:
                logs = "".join(f"\n{log.name}: {log.read_text()[-2000:]}" for log in self.folder.glob("*.log"))
                raise TimeoutError(f"{there} of {wanted} slots after {timeout:.0f} s{logs}")
            time.sleep(0.1)


@contextlib.contextmanager
def make_cluster(net: Hosts, folder: Path, cores: int = 1, **settings: str) -> Iterator[Cluster]:
    """Start a cluster on hosts and an application on it; end both.

    Args:
        net: The hosts.
        folder: A folder for logs and work.
        cores: Task slots of each host.
        **settings: Settings of the application.
    """
    cluster = Cluster(net, cores, folder)
    with contextlib.ExitStack() as undo:
        with (folder / "master.log").open("ab") as log:
            command = [str(_HOME / "bin/spark-class"), "org.apache.spark.deploy.master.Master", "--host"]
            options = [bracketed(net.driver), "--port", str(_PORT), "--webui-port", "0"]
            master = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command, *options],
                stdout=log,
                stderr=log,
                env=environment({**_daemon_env(net), "SPARK_LOCAL_IP": net.driver}),
            )
        undo.callback(end, master)
        # A worker or an application without a master gives up after a minute.
        wait_until(lambda: listens(net.driver, _PORT), 120.0)
        for host in net.hosts:
            cluster.start_worker(host)
            undo.callback(host.end_processes)
        cluster.session = start_session(
            cluster.master,
            **{
                "spark.driver.host": bracketed(net.driver),
                "spark.driver.bindAddress": bracketed(net.driver),
                "spark.executor.memory": "768m",
                # Otherwise stop() waits two minutes for a cleaner that asks an executor which a test has cut off.
                "spark.cleaner.referenceTracking.blocking": "false",
                # An executor fetches a job's closure from the driver or from another that has it. If a test has
                # blocked the connection to that one, Spark tries the next after two minutes, three times.
                "spark.shuffle.io.connectionTimeout": "3s",
                "spark.shuffle.io.maxRetries": "0",
                **DRIVER_PORTS,
                **settings,
            },
        )
        undo.callback(cluster.session.stop)
        for host in net.hosts:
            # First, connected again: Spark would wait two minutes for an executor that a test has cut off.
            undo.callback(host.end_processes)
            undo.callback(net.mend, host)
        cluster.wait_for_slots(len(net.hosts) * cores)
        yield cluster


def bracketed(address: str) -> str:
    """Return an address as Spark expects a host: with brackets round IPv6."""
    return f"[{address}]" if ":" in address else address


def _daemon_env(net: Hosts) -> dict[str, str]:
    # The master would drop a worker after a minute without heartbeats, but hosts that were cut off are needed again.
    options = f"-Dspark.worker.timeout=600 {SHORT_LIVED}" + (" -Djava.net.preferIPv6Addresses=true" if net.six else "")
    return {
        "SPARK_HOME": str(_HOME),
        "SPARK_NO_DAEMONIZE": "1",
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_DAEMON_JAVA_OPTS": options,
        "OMP_NUM_THREADS": "1",
    }
