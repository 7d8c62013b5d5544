"""Spark sessions for the tests, on loopback only, and checks that tests leave nothing behind."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tests.forked import fork_run_servers, share_server
from tests.jvm import SHORT_LIVED
from tests.ranks import wait_until as wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOCAL = "local[2]"
LOCAL_CLUSTER = "local-cluster[2,1,1024]"

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("KERAS_BACKEND", "torch")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # here, since multiprocessing's fork server keeps its first environment
os.environ["PYSPARK_PYTHON"] = sys.executable
# Or each rank would import it: whatever asserts something pytest, and whatever is given rows the modules of data.
os.environ.setdefault("SPARK_HVD_PRELOAD", "pytest,spark_hvd.data.shard,spark_hvd.data.source,spark_hvd.data.spool")
os.environ["SPARK_SUBMIT_OPTS"] = SHORT_LIVED  # of the JVM of every Spark program that a test starts


def not_activated() -> dict[str, str]:
    """Return the environment of a user who calls this interpreter by its path, without activating its environment."""
    here = os.path.dirname(sys.executable)
    path = [folder for folder in os.environ["PATH"].split(os.pathsep) if folder != here]
    return {k: v for k, v in os.environ.items() if k not in {"PYSPARK_PYTHON", "SPARK_HVD_PRELOAD"}} | {
        "PATH": os.pathsep.join(path)
    }


def pytest_configure(config: pytest.Config) -> None:
    """Turn off Hypothesis' deadlines, and reduce its examples except at night. Set a temporary folder for this process.

    Tests look there for remaining files.
    """
    with contextlib.suppress(ImportError):  # some rows of the matrix have none
        from hypothesis import settings

        night = "SPARK_HVD_NIGHT" in os.environ
        settings.register_profile("spark_hvd", settings(), deadline=None, max_examples=500 if night else 30)
        settings.load_profile("spark_hvd")
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        gc.disable()  # until all tests are imported: what imports make stays
    if hasattr(config, "workerinput"):
        if os.environ["PYTEST_XDIST_WORKER"] != WITH_JVM and config.workerinput["workercount"] > 2:
            os.nice(5)
        # Short, as paths of sockets are limited.
        own = tempfile.mkdtemp(prefix=os.environ["PYTEST_XDIST_WORKER"])
        os.environ["TMPDIR"] = tempfile.tempdir = own
        # After multiprocessing has removed its own folder from there.
        Finalize(None, shutil.rmtree, (own, True), exitpriority=-200)
    elif config.getoption("numprocesses", None) and not config.pluginmanager.has_plugin("tests.cost"):
        share_server()  # not with tests.cost, which asks each of pytest's processes what those below it have used
    fork_run_servers()


_TOGETHER = {
    **dict.fromkeys(("contract/test_keras.py", "contract/test_tensorflow.py", "oracle/test_taping.py"), "tensorflow"),
    **dict.fromkeys(("unit/test_docs_site.py", "unit/test_doors.py", "unit/test_modules.py"), "frameworks"),
    **dict.fromkeys(("unit/test_mlflow_tracker.py", "unit/test_tuning.py"), "mlflow"),
    **dict.fromkeys(("walk/test_mistakes.py", "walk/test_pages.py"), "walk"),
}
"""Files that share what takes long to load: ranks with TensorFlow, all frameworks in pytest's process, a program."""
_LONG = {"frameworks", "gpu_sim/test_gpu_sim.py", "tensorflow", "walk"}
"""Places that take minutes."""
_TWO_SLOTS = {"test_elastic_on_hosts.py", "test_faults.py"}
"""Files that share a cluster on hosts, and wait most of the time."""


def place_of(test: str) -> str:
    """Return the place of a test: a file, a folder of spark, the cluster or hosts. A place runs in one process."""
    folder, *below = test.partition("::")[0].removeprefix("tests/").split("/")
    if not below:
        return folder
    if folder == "multihost":
        return f"multihost/{'two slots' if below[0] in _TWO_SLOTS else 'the others'}"
    if folder == "spark" and "cluster" in below[0]:
        return "cluster"
    if folder == "spark" and "keras" in test.partition("::")[2].partition("[")[0]:
        return "spark/keras"  # which it takes 20 seconds of CPU to load, here and for ranks
    place = f"{folder}/{below[0]}"
    return _TOGETHER.get(place, place)


def needs_jvm(place: str) -> bool:
    """Return whether the tests of a place use a Spark session."""
    return place == "cluster" or place.startswith("spark/") or place in _WITH_SESSIONS


WITH_JVM = "gw0"
"""The process of pytest that begins with Spark's tests. They take longest, so the others leave it the cores."""
FEW = 10
"""Places of Spark's tests for which another JVM is not worth its start."""
_WITH_SESSIONS = {
    "contract/test_hub_faults.py",
    "contract/test_petastorm_spark.py",
    "contract/test_run_contract.py",
    "oracle/test_fitting.py",
    "oracle/test_loading.py",
}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Schedule by place. pytest-xdist 3.8 puts its own groups into test names, where pytest 9.2 drops them."""
    from xdist.scheduler import LoadScopeScheduling

    class ByPlace(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return place_of(nodeid)

        def _assign_work_unit(self, node: Any) -> None:
            # A JVM uses a minute of CPU until it is warm: one process has Spark's tests until all others are taken.
            ids = {each.gateway.id for each in self.nodes}
            spark = node.gateway.id == WITH_JVM or WITH_JVM not in ids  # which has crashed, or had nothing to do
            place = next((place for place in self.workqueue if needs_jvm(place) == spark), None)
            if place is not None:
                self.workqueue.move_to_end(place, last=False)
            elif not spark and len(self.workqueue) < FEW and not any(map(needs_jvm, self.assigned_work[node])):
                node.shutdown()
                return
            super()._assign_work_unit(node)

    config.option.loadscopereorder = False
    return ByPlace(config, log)


_LEFT_OUT = {
    mark: re.compile(rf"^pytestmark = (\[[^\]]*)?pytest\.mark\.{mark}\b", re.MULTILINE)
    for mark in ("slow", "night", "gpu")
}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import a file if its marks deselect all its tests, because some import TensorFlow, which is slow."""
    if not re.fullmatch(r"test_\w+\.py", collection_path.name):
        return None
    marks, text = config.option.markexpr, collection_path.read_text()
    nothing = any(f"not {mark}" in marks and found.search(text) for mark, found in _LEFT_OUT.items())
    # Readers are given by tests/contract/reader_data.py, of which one is slow.
    slow = "mark.slow" in text or re.search(r"reader_data import .*\bevery\b", text)
    return True if nothing or (marks.startswith("slow") and not slow) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put long tests first, so that processes end at about the same time."""
    order = ["cluster", "multihost", "long", "spark", "contract", "horovod"]

    def rank(item: pytest.Item) -> int:
        place = place_of(item.nodeid)
        folder = "spark" if needs_jvm(place) and place != "cluster" else place.split("/")[0]
        folder = "long" if place in _LONG else folder
        return order.index(folder) if folder in order else len(order)

    items.sort(key=rank)


def pytest_collection_finish() -> None:
    """Refuse test modules that import spark_hvd.horovod, which gives this process and its ranks Horovod's dialect."""
    if "spark_hvd.horovod" in sys.modules:
        raise pytest.UsageError("A test module imports spark_hvd.horovod when it is collected: import it in the tests.")
    gc.enable()
    gc.freeze()  # then each collection skips 300,000 objects of torch


def pytest_exception_interact(call: pytest.CallInfo[Any]) -> None:
    """After a timeout of pytest, close the connection to the JVM, so that no later call gets the late answer."""
    cut_off = call.excinfo is not None and "pytest-timeout" in str(call.excinfo.value)
    if cut_off and "pyspark" in sys.modules:
        from pyspark import SparkContext

        gateway: Any = SparkContext._gateway
        if gateway is not None and (connection := gateway._gateway_client.get_thread_connection()) is not None:
            connection.close()  # the next call opens another


@pytest.fixture(autouse=True)
def _own_dialect() -> Iterator[None]:
    """Restore our dialect after a test that imports spark_hvd.horovod."""
    yield
    if "spark_hvd.horovod" in sys.modules:
        for name in [name for name in sys.modules if f"{name}.".startswith(("horovod.", "spark_hvd.horovod."))]:
            del sys.modules[name]
        sys.meta_path[:] = [each for each in sys.meta_path if type(each).__module__ != "spark_hvd.horovod.finder"]
        os.environ.pop("SPARK_HVD_DIALECT", None)


def start_session(master: str, **settings: str) -> SparkSession:
    """Start a session on ``master``, and end the active one, because an application has only one master."""
    import pyspark
    from pyspark import SparkConf, SparkContext
    from pyspark.sql import SparkSession

    if SparkContext._gateway is None:
        # The settings of a process's first session are the JVM's own, and so every later session's. So the JVM is
        # started before, without the fake GPUs of one.
        SparkContext._ensure_initialized(conf=SparkConf().set("spark.driver.extraJavaOptions", SHORT_LIVED))
    if (active := SparkSession.getActiveSession()) is not None:
        active.stop()
    os.environ["SPARK_HOME"] = str(Path(pyspark.__file__).parent)  # local-cluster starts executors from there
    builder = SparkSession.builder.master(master).appName("spark_hvd tests")
    defaults = {
        "spark.ui.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.log.level": "ERROR",
        "spark.sql.shuffle.partitions": "2",
        # Each query of a test would be compiled, by Janino and by the JVM, for a few rows.
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.extraJavaOptions": SHORT_LIVED,
        "spark.executor.extraJavaOptions": SHORT_LIVED,
    }
    if master == LOCAL:  # executors of a cluster do not have this folder on their path
        defaults["spark.python.daemon.module"] = "tests.warm_daemon"
    for key, value in {**defaults, **settings}.items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    # As Spark sets it for SQL: where RDDs, those of createDataFrame among them, have another environment, Spark starts
    # a second daemon for them, which imports torch once more.
    session.sparkContext.environment["SPARK_SIMPLIFIED_TRACEBACK"] = "1"
    session.range(4, numPartitions=2).count()
    return session


@pytest.fixture(scope="session", autouse=True)
def _worker_dir(tmp_path_factory: pytest.TempPathFactory) -> None:
    # local-cluster would write its app-* folders into site-packages
    os.environ["SPARK_WORKER_DIR"] = str(tmp_path_factory.mktemp("spark-work"))


def _active(master: str, executors: int = 0) -> SparkSession | None:
    """Return the active session if it belongs to the tests, has this master, and has lost no executor."""
    from pyspark.sql import SparkSession

    session = SparkSession.getActiveSession()
    if session is None or session.conf.get("spark.master") != master or session.sparkContext._jsc is None:
        return None
    return session if session.sparkContext._jsc.sc().getExecutorMemoryStatus().size() == 1 + executors else None


@pytest.fixture(scope="module")
def spark() -> SparkSession:
    """A session on local[2], which is kept between modules."""
    return _active(LOCAL) or start_session(LOCAL)


@contextlib.contextmanager
def daemon_of(spark: SparkSession, module: str) -> Iterator[None]:
    """Let new Python workers come from this daemon, whatever the session's settings are. Each job reads its name."""
    context: Any = spark.sparkContext
    conf = context._jsc.sc().conf()
    before = conf.get("spark.python.daemon.module")
    conf.set("spark.python.daemon.module", module)
    try:
        yield
    finally:
        conf.set("spark.python.daemon.module", before)


@contextlib.contextmanager
def workers_with(spark: SparkSession, *modules: str) -> Iterator[None]:
    """Fork new Python workers from a daemon that has imported these modules, because importing them takes seconds."""
    environment: Any = spark.sparkContext.environment
    environment["SPARK_HVD_TESTS_LOADED"] = " ".join(modules)
    try:
        yield
    finally:
        del environment["SPARK_HVD_TESTS_LOADED"]


def fake_gpus(folder: Path, each: int = 2) -> dict[str, str]:
    """Return settings that give each worker ``each`` fake GPUs: 0 and 1 to the first, 2 and 3 to the next, ..."""
    script = folder / "gpus.sh"
    names = ", ".join(f'\\"$((first + {number}))\\"' for number in range(each))
    script.write_text(
        f"#!/bin/sh\nworker=0\nuntil mkdir {folder}/worker-$worker 2>/dev/null; do worker=$((worker + 1)); done\n"
        f'first=$((worker * {each}))\necho "{{\\"name\\": \\"gpu\\", \\"addresses\\": [{names}]}}"\n'
    )
    script.chmod(0o755)
    return {
        "spark.worker.resource.gpu.amount": str(each),
        "spark.worker.resource.gpu.discoveryScript": str(script),
        "spark.executor.resource.gpu.amount": str(each),
    }


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> SparkSession:
    """A session on local-cluster[2,1,1024], which is kept between modules: two executors, each with two fake GPUs."""
    active = _active(LOCAL_CLUSTER, executors=2)
    if active is None or active.conf.get("spark.worker.resource.gpu.amount", None) is None:
        active = start_session(LOCAL_CLUSTER, **fake_gpus(tmp_path_factory.mktemp("gpus")))
    return active


def _servers_and_ranks() -> tuple[list[psutil.Process], list[psutil.Process]]:
    found = {}
    for pid in psutil.pids():
        # psutil and pathlib take several times as long, and hundreds of tests look.
        with contextlib.suppress(OSError, IndexError, ValueError), open(f"/proc/{pid}/cmdline", "rb") as file:
            if b"\0spark_hvd.runner.supervise.forkserver\0" in (command := file.read()):
                found[pid] = int(command.split(b"\0")[-3])
    servers: list[psutil.Process] = []
    ranks: list[psutil.Process] = []
    for pid, anchor in found.items():
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            # A server outlives the worker that started it. Forks have their server's command line.
            if anchor == os.getpid() or psutil.Process() in psutil.Process(anchor).parents():
                (ranks if process.ppid() in found else servers).append(process)
    return servers, ranks


def fork_servers() -> list[psutil.Process]:
    """Return the fork servers that end with this process or one below it."""
    return _servers_and_ranks()[0]


def ranks_alive() -> list[psutil.Process]:
    """Return the processes that the fork servers have forked."""
    return _servers_and_ranks()[1]


def have_ended(pids: Iterable[int]) -> bool:
    """Return whether no such process runs. One that nobody has waited for has ended: tests.cost adopts orphans."""
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                return False
    return True


def listening() -> list[str]:
    """Return the addresses at which this process listens."""
    process: Any = psutil.Process()
    connections = getattr(process, "net_connections", None) or process.connections  # the name before psutil 6
    return [each.laddr.ip for each in connections("tcp") if each.status == psutil.CONN_LISTEN]


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """Fail if a test leaves a rank, a file descriptor, a thread of ours or a temporary file behind."""
    import threading

    def ours() -> set[str]:
        threads = {t.name for t in threading.enumerate() if t.name.startswith("spark_hvd")}
        return threads | {path.name for path in Path(tempfile.gettempdir()).glob("spark_hvd-*")}

    before, listening_before = ours(), len(listening())
    yield
    wait_until(lambda: not ranks_alive())
    wait_until(lambda: ours() <= before)
    assert len(listening()) <= listening_before
