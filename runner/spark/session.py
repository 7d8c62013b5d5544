"""Questions to PySpark about the application, asked on the driver."""

from __future__ import annotations

import functools
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import TYPE_CHECKING

from spark_hvd.runner.channel.address import way_to
from spark_hvd.runner.outcome.errors import ClusterError, SetupError
from spark_hvd.runner.spark import private as spark_private
from spark_hvd.runner.spark.needed import check_pyspark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


_log = logging.getLogger(__name__)


def active_session(spark: SparkSession | None) -> SparkSession:
    """Return ``spark``, or the session that is active in this thread or application.

    Raises:
        ClusterError: There is none, or it has been stopped.
        ImportError: There is no PySpark.
    """
    check_pyspark()
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    if spark is not None:
        if not is_connect(spark) and spark_private.is_stopped(spark):
            raise ClusterError(
                "this Spark session has been stopped. Make a new one, SparkSession.builder.getOrCreate(), and "
                "DataFrames with it"
            )
        return spark
    try:
        return SparkSession.active()  # or the default session: a thread that the user started has no active one
    except PySparkException as error:
        if os.environ.get("TORCHELASTIC_RUN_ID", "").startswith("spark_hvd"):
            raise ClusterError(
                "this is a rank, and ranks have no Spark: call run, or an estimator's fit, in the program that starts "
                "the ranks"
            ) from None
        raise ClusterError(
            "there is no active Spark session. Create one first (SparkSession.builder.getOrCreate()) or pass spark=; "
            "to train without Spark, on this machine only, use spark_hvd.run_local."
        ) from error


def is_connect(spark: SparkSession) -> bool:
    """Tell whether the session is a Spark Connect client, which cannot reach the JVM."""
    return "connect" in type(spark).__module__


def conf(spark: SparkSession, key: str) -> str | None:
    """Return a setting of the application or the session, or None."""
    value: str | None = spark.conf.get(key, None)
    return value


def tells_case_apart(spark: SparkSession) -> bool:
    """Tell whether "a" and "A" are two columns for a session."""
    return conf(spark, "spark.sql.caseSensitive") == "true"


def is_local(spark: SparkSession) -> bool:
    """Tell whether all tasks run in the driver's own JVM (``local[N]``; not ``local-cluster``)."""
    master = conf(spark, "spark.master") or ""
    return not is_connect(spark) and (master == "local" or master.startswith("local["))


def choose_python(spark: SparkSession) -> None:
    """On a local master, let Spark's workers run this program's Python, unless the user chose another.

    Spark itself takes the first ``python3`` on PATH, which is the wrong one if an environment's Python was called by
    its full path. On other masters we know nothing about the hosts' interpreters and change nothing.

    Raises:
        SetupError: The chosen Python lacks modules that our tasks need.
    """
    if not is_local(spark):
        return
    from pyspark import SparkFiles  # missing from pyspark-client, which has Spark Connect only

    context = spark.sparkContext
    chosen = os.environ.get("PYSPARK_PYTHON") or conf(spark, "spark.pyspark.python")
    if context.pythonExec == "python3" and not chosen:
        context.pythonExec = sys.executable
    shipped = SparkFiles.getRootDirectory()
    archives = [os.path.join(shipped, name) for name in os.listdir(shipped) if name.endswith((".zip", ".egg"))]
    missing = _missing_from(context.pythonExec, (shipped, *archives))
    if missing:
        raise SetupError(
            f"Spark's workers would run {context.pythonExec}, which cannot be used: {missing}. This program runs "
            f"{sys.executable}: unset PYSPARK_PYTHON and spark.pyspark.python, or set them to that path"
        )


@functools.cache
def _missing_from(python: str, shipped: tuple[str, ...]) -> str:
    """Say why a Python of this host cannot run our tasks with the files that Spark ships; "" if it can."""
    if os.path.abspath(shutil.which(python) or python) == os.path.abspath(sys.executable):
        return ""
    command = [python, "-c", f"import sys; sys.path[:0] = {shipped!r}; import pyarrow, pandas, zmq, spark_hvd"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    lines = done.stderr.strip().splitlines()
    return (lines[-1] if lines else f"exit status {done.returncode}") if done.returncode else ""


def max_result_bytes(spark: SparkSession) -> int | None:
    """Return how many bytes a job may return before it exhausts the Java heap; None with Spark Connect.

    Spark holds about five copies of a result (measured with 2 x 200 MiB: 1 GiB and 1.5 GiB of heap fail, 2 GiB is
    enough). It fails badly, with an OutOfMemoryError in one of its own threads, after which jobs hang.
    """
    if is_connect(spark):
        return None
    heap, limit = spark_private.heap_and_result_limit(spark)
    return min(heap // 5, limit or heap)


def loses_executors_after(spark: SparkSession) -> float:
    """Return the seconds after which Spark has noticed an executor that does not answer."""
    return spark_private.network_timeout(spark) + 60  # it looks once a minute


def temporary_directory(spark: SparkSession) -> tempfile.TemporaryDirectory[str]:
    """Make a directory for the run. If this process is killed, it goes with Spark's own temporary files."""
    return tempfile.TemporaryDirectory(prefix="spark_hvd-", dir=spark_private.temporary_folder(spark))


def check_barrier_possible(spark: SparkSession) -> None:
    """Refuse settings that Spark would refuse later, with a less helpful message.

    Raises:
        ClusterError: dynamic allocation is on (SPARK-24942).
    """
    if has_dynamic_allocation(spark):
        raise ClusterError(
            "spark.dynamicAllocation.enabled=true: Spark runs no barrier stage with dynamic allocation (SPARK-24942), "
            "and ranks that train together need one. Start the application with spark.dynamicAllocation.enabled=false "
            "and a fixed number of executors (spark.executor.instances)."
        )


def has_dynamic_allocation(spark: SparkSession) -> bool:
    """Tell whether Spark starts executors when tasks wait for them."""
    return not is_local(spark) and conf(spark, "spark.dynamicAllocation.enabled") == "true"


def check_elastic_possible(spark: SparkSession) -> None:
    """Refuse settings with which an elastic run cannot work, and warn about those that limit it.

    Raises:
        ClusterError: speculation is on.
    """
    if conf(spark, "spark.speculation") == "true":
        raise ClusterError(
            "spark.speculation=true: Spark would start a second copy of long tasks, and all ranks are long tasks. "
            "Start the application with spark.speculation=false"
        )
    failures = int(conf(spark, "spark.task.maxFailures") or 4)
    if not is_local(spark) and failures < 2:
        _log.warning(
            "spark.task.maxFailures=%d: Spark will end the run when the first executor is lost. Start the application "
            "with a larger value; Spark counts lost executors for each task",
            failures,
        )
    if conf(spark, "spark.excludeOnFailure.enabled") == "true":
        _log.warning(
            "spark.excludeOnFailure.enabled=true: Spark may exclude hosts for good after it lost executors. An elastic "
            "run excludes hosts itself (host_failure_limit=, cooldown_range=)"
        )


def busy_tasks(spark: SparkSession) -> int:
    """Return how many tasks run now in the application; 0 with Spark Connect, which does not say."""
    if is_connect(spark):
        return 0
    tracker = spark.sparkContext.statusTracker()
    stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
    return sum(stage.numActiveTasks for stage in stages if stage is not None)


def driver_hosts(spark: SparkSession) -> tuple[str, str]:
    """Return the host by which executors reach this program, and the one on which it listens.

    A Spark Connect client uses the local address of its route to the server.

    Raises:
        OSError: A client has no route to its server, or does not know the server's host.
    """
    if is_connect(spark):
        try:
            own = way_to(str(spark.client.host).strip("[]"))
        except NotImplementedError:  # a custom ChannelBuilder
            raise OSError("this Spark Connect session does not tell its server's host") from None
        return own, own
    public = conf(spark, "spark.driver.host") or "127.0.0.1"
    bind = conf(spark, "spark.driver.bindAddress") or public
    return public.strip("[]"), bind.strip("[]")  # Spark writes IPv6 addresses in brackets


def address_of(host: str) -> str:
    """Resolve a host: ZeroMQ binds to addresses only, and the driver's host is often a name.

    Raises:
        OSError: The name cannot be resolved.
    """
    return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])


def _host_and_port(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)


def executor_addresses(spark: SparkSession) -> dict[str, tuple[str, int]]:
    """Return host and port of every live executor, by its ID; empty if Spark does not say."""
    if is_connect(spark):
        return {}
    try:
        return listening(spark_private.executor_ports(spark))
    except Exception as error:
        spark_private.does_not_tell(
            spark,
            "where executors are",
            "A host that stops answering is noticed only when Spark's timeouts end.",
            error,
        )
        return {}


def listening(executors: Mapping[str, str]) -> dict[str, tuple[str, int]]:
    """Return host and port of the executors that have a port; one that is starting has none yet."""
    return {name: _host_and_port(text) for name, text in executors.items() if re.search(r":\d+$", text)}
