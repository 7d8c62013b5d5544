"""A Spark standalone cluster on loopback, controlled by a test: workers join, are decommissioned, and are killed.

Its hosts are loopback addresses, 127.0.0.2 and so on: Spark and the elastic run treat them as different hosts, while
ranks connect on 127.0.0.1, as they may on one machine.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pyspark

from spark_hvd.runner.spark.profiles import ResourceRequest, task_resources
from spark_hvd.runner.spark.slots import task_slots
from tests.conftest import start_session
from tests.daemons import command_line, end, listens
from tests.elastic_jobs import Line, read
from tests.jvm import SHORT_LIVED

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_HOME = Path(pyspark.__file__).parent
_DRIVER = "127.0.0.1"
_DAEMON_OPTIONS = (
    f"{SHORT_LIVED} -Dspark.decommission.enabled=true -Dspark.deploy.maxExecutorRetries=-1 "
    "-Dspark.worker.executorStateSync.maxAttempts=1"
)


@dataclass(eq=False)
class ElasticCluster:
    """A running cluster.

    Attributes:
        folder: A folder for logs and work.
        port: The master's port.
        workers: The daemon on each host.
        cores: Its slots.
        decommissioned: Hosts whose worker still exists, but gets no work.
        session: The application's session.
    """

    folder: Path
    port: int
    workers: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    cores: dict[str, int] = field(default_factory=dict)
    decommissioned: set[str] = field(default_factory=set)
    session: SparkSession = field(init=False)

    def __post_init__(self) -> None:
        # A process that ends with its parent ends with the thread that started it, and a test's thread is short-lived.
        self.starter = ThreadPoolExecutor(1, "starter")

    @property
    def master(self) -> str:
        """Return the master's URL."""
        return f"spark://{_DRIVER}:{self.port}"

    def add_worker(self, host: str, cores: int = 1) -> None:
        """Start a worker daemon; an executor starts by itself."""
        assert host not in self.workers
        work = self.folder / f"{host}-{time.monotonic_ns()}"
        options = ["--host", host, "--webui-port", "0", "-c", str(cores), "-m", "1g", "-d", str(work), self.master]
        self.workers[host] = self._start("worker.Worker", host, *options)
        self.cores[host] = cores

    def kill_workers(self) -> None:
        """Lose all hosts."""
        for host in [*self.workers]:
            self.kill_worker(host)

    def kill_worker(self, host: str) -> None:
        """Lose a host: its worker, executor and ranks are killed at once."""
        worker = self.workers.pop(host)
        self.decommissioned.discard(host)
        everything = [psutil.Process(worker.pid), *psutil.Process(worker.pid).children(recursive=True)]
        for process in everything:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        worker.wait(10)

    def kill_executor(self, host: str) -> None:
        """Kill the executor's JVM; Spark replaces it."""
        self.executor(host).kill()

    def decommission_worker(self, host: str) -> None:
        """Decommission the worker and its executor: both are told, and no executor is started there any more."""
        self.workers[host].send_signal(signal.SIGPWR)
        self.decommissioned.add(host)

    def decommission_executor(self, host: str) -> None:
        """Decommission the executor: it is told that it will end."""
        self.executor(host).send_signal(signal.SIGPWR)

    def executor(self, host: str) -> psutil.Process:
        """Return the executor's JVM on a host."""
        below = psutil.Process(self.workers[host].pid).children(recursive=True)
        return next(process for process in below if "CoarseGrainedExecutorBackend" in command_line(process))

    def provide(self, **cores: int) -> None:
        """Provide exactly these hosts, with so many slots each; ``h2`` is 127.0.0.2."""
        wanted = {f"127.0.0.{name[1:]}": number for name, number in cores.items()}
        for host in [*self.workers]:
            if self.workers[host].poll() is not None:
                self.workers.pop(host)
            elif wanted.get(host) != self.cores[host] or host in self.decommissioned:
                self.kill_worker(host)
        for host, number in wanted.items():
            if host not in self.workers:
                self.add_worker(host, number)
        self.wait_for_slots(sum(wanted.values()))

    def wait_for_slots(self, wanted: int, timeout: float = 90.0) -> None:
        """Wait until the application has ``wanted`` task slots."""
        deadline = time.monotonic() + timeout
        while (there := task_slots(self.session, task_resources(self.session, ResourceRequest())) or 0) != wanted:
            if time.monotonic() > deadline:
                logs = "".join(f"\n{log.name}: {log.read_text()[-2000:]}" for log in self.folder.glob("*.log"))
                raise TimeoutError(f"{there} of {wanted} slots after {timeout:.0f} s{logs}")
            time.sleep(0.1)

    def _start(self, kind: str, name: str, *options: str) -> subprocess.Popen[bytes]:
        command = ["setpriv", "--pdeathsig", "KILL", str(_HOME / "bin/spark-class"), f"org.apache.spark.deploy.{kind}"]
        env = {
            **os.environ,
            "SPARK_HOME": str(_HOME),
            "SPARK_NO_DAEMONIZE": "1",
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": _DAEMON_OPTIONS,
            "SPARK_LOCAL_IP": name if name != "master" else _DRIVER,
            "SPARK_PUBLIC_DNS": name if name != "master" else _DRIVER,
        }
        with (self.folder / f"{name}.log").open("ab") as log:
            start = self.starter.submit(subprocess.Popen, [*command, *options], stdout=log, stderr=log, env=env)
            return start.result()


@contextlib.contextmanager
def elastic_cluster(folder: Path, **settings: str) -> Iterator[ElasticCluster]:
    """Start a master and an application without executors; end both.

    Args:
        folder: A folder for logs and work.
        **settings: Settings of the application.
    """
    with socket.create_server((_DRIVER, 0)) as free:
        port = free.getsockname()[1]
    cluster = ElasticCluster(folder, port)
    with contextlib.ExitStack() as undo:
        undo.callback(cluster.starter.shutdown)
        options = ["--host", _DRIVER, "--port", str(port), "--webui-port", "0"]
        master = cluster._start("master.Master", "master", *options)
        undo.callback(end, master)
        deadline = time.monotonic() + 300
        while not listens(_DRIVER, port):
            assert time.monotonic() < deadline, (folder / "master.log").read_text()
            time.sleep(0.1)
        undo.callback(cluster.kill_workers)
        cluster.add_worker("127.0.0.2")  # a session counts to four before it is ready
        cluster.session = start_session(
            cluster.master,
            **{
                "spark.executor.memory": "512m",
                "spark.task.maxFailures": "1000",
                "spark.decommission.enabled": "true",
                "spark.storage.decommission.enabled": "false",
                **settings,
            },
        )
        undo.callback(cluster.session.stop)
        yield cluster


class Progress:
    """What the ranks of a job have recorded so far, and a file that ends it.

    Args:
        folder: A folder for both.
    """

    def __init__(self, folder: Path) -> None:
        self.log = folder / "log"
        self.until = folder / "until"

    def wait(self, condition: Callable[[Line], bool], timeout: float = 60.0) -> Line:
        """Wait until a recorded line satisfies a condition, and return it."""
        deadline = time.monotonic() + timeout
        while not (found := [line for line in read(self.log) if condition(line)]):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not noted after {timeout:g} s; the last lines: {read(self.log)[-4:]}")
            time.sleep(0.02)
        return found[0]

    def end(self) -> None:
        """Let the job return after its current epoch."""
        self.until.touch()


@contextlib.contextmanager
def directed(progress: Progress, script: Callable[[Progress], None]) -> Iterator[None]:
    """While a job runs within this context, let a script change its cluster; then let the job end.

    Raises:
        Exception: What the script raised.
    """
    errors = []

    def body() -> None:
        try:
            script(progress)
        except BaseException as error:
            errors.append(error)
        finally:
            progress.end()

    thread = threading.Thread(target=body, name="director", daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join(60)
        if errors:
            raise errors[0]
