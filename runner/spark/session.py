"""What is asked of PySpark about the application, on the driver."""

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
        ClusterError: there is none, or it has been stopped.
        ImportError: there is no PySpark.
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
        return SparkSession.active()  # else the default one: threads that the user started have none of their own
    except PySparkException as error:
        if os.environ.get("TORCHELASTIC_RUN_ID", "").startswith("spark_hvd"):
            raise ClusterError(
                "ranks have no Spark, and this is one: call run, or an estimator's fit, in the program that starts them"
            ) from None
        raise ClusterError(
            "there is no active Spark session. Create one first (SparkSession.builder.getOrCreate()) or pass spark=; "
            "to train without Spark, on this machine only, use spark_hvd.run_local."
        ) from error


def is_connect(spark: SparkSession) -> bool:
    """Whether the session is a Spark Connect client, with no JVM in reach."""
    return "connect" in type(spark).__module__


def conf(spark: SparkSession, key: str) -> str | None:
    """A setting of the application or the session, or None."""
    value: str | None = spark.conf.get(key, None)
    return value


def tells_case_apart(spark: SparkSession) -> bool:
    """Whether "a" and "A" are two columns for a session."""
    return conf(spark, "spark.sql.caseSensitive") == "true"


def is_local(spark: SparkSession) -> bool:
    """Whether all tasks run in the driver's own JVM (``local[N]``; not ``local-cluster``)."""
    master = conf(spark, "spark.master") or ""
    return not is_connect(spark) and (master == "local" or master.startswith("local["))


def choose_python(spark: SparkSession) -> None:
    """On a local master, let Spark's workers run the Python that runs this program, unless the user chose another.

    Spark itself takes the ``python3`` that is first on PATH, which is another one where an environment is used by its
    full path. On other masters nothing is known of the hosts' interpreters, and nothing is changed.

    Raises:
        SetupError: the one that was chosen has not what tasks of ours need.
    """
    if not is_local(spark):
        return
    from pyspark import SparkFiles  # which a Connect client without the rest of PySpark does not have

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
            f"{sys.executable}: unset PYSPARK_PYTHON and spark.pyspark.python, or point them at that"
        )


@functools.cache
def _missing_from(python: str, shipped: tuple[str, ...]) -> str:
    """Why a Python of this host cannot run our tasks, with what Spark ships to them; "" if it can."""
    if os.path.abspath(shutil.which(python) or python) == os.path.abspath(sys.executable):
        return ""
    command = [python, "-c", f"import sys; sys.path[:0] = {shipped!r}; import pyarrow, pandas, zmq, spark_hvd"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    said = done.stderr.strip().splitlines()
    return (said[-1] if said else f"exit status {done.returncode}") if done.returncode else ""


def max_result_bytes(spark: SparkSession) -> int | None:
    """How many bytes of values a job may return before Java heap runs out and takes the application along.

    Spark holds a result about five times on its way (measured with 2 x 200 MiB: 1 GiB and 1.5 GiB of heap fail, 2 GiB
    is enough), and fails badly: an OutOfMemoryError in one of its own threads, after which jobs hang.
    """
    if is_connect(spark):
        return None
    heap, limit = spark_private.heap_and_result_limit(spark)
    return min(heap // 5, limit or heap)


def temporary_directory(spark: SparkSession) -> tempfile.TemporaryDirectory[str]:
    """A directory that goes with the run, and with Spark's own temporary files should this process be killed."""
    return tempfile.TemporaryDirectory(prefix="spark_hvd-", dir=spark_private.temporary_folder(spark))


def check_barrier_possible(spark: SparkSession) -> None:
    """Refuse what Spark would refuse later, with less help.

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
    """Whether Spark starts executors as tasks wait for them."""
    return not is_local(spark) and conf(spark, "spark.dynamicAllocation.enabled") == "true"


def check_elastic_possible(spark: SparkSession) -> None:
    """Refuse, or warn of, settings with which an elastic run could not do what it promises.

    Raises:
        ClusterError: it cannot run at all.
    """
    if conf(spark, "spark.speculation") == "true":
        raise ClusterError(
            "spark.speculation=true: Spark would start a second copy of tasks that run for long, which all ranks do. "
            "Start the application with spark.speculation=false"
        )
    failures = int(conf(spark, "spark.task.maxFailures") or 4)
    if not is_local(spark) and failures < 2:
        _log.warning(
            "spark.task.maxFailures=%d: Spark will end the run with the first executor that is lost; start the "
            "application with more (Spark counts lost executors for each task)",
            failures,
        )
    if conf(spark, "spark.excludeOnFailure.enabled") == "true":
        _log.warning(
            "spark.excludeOnFailure.enabled=true: Spark may exclude hosts after lost executors, for good; an elastic "
            "run excludes hosts itself (host_failure_limit=, cooldown_range=)"
        )


def busy_tasks(spark: SparkSession) -> int:
    """How many tasks of other jobs run now; 0 where that cannot be asked (Spark Connect)."""
    if is_connect(spark):
        return 0
    tracker = spark.sparkContext.statusTracker()
    stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
    return sum(stage.numActiveTasks for stage in stages if stage is not None)


def driver_hosts(spark: SparkSession) -> tuple[str, str]:
    """By which name or address executors reach this program, and on which it is to listen.

    A client of Spark Connect takes the address by which it reaches the server itself.

    Raises:
        OSError: a client has no way to its server, or does not know it.
    """
    if is_connect(spark):
        try:
            own = way_to(str(spark.client.host).strip("[]"))
        except NotImplementedError:  # a ChannelBuilder of somebody else's
            raise OSError("this Spark Connect session does not tell its server's host") from None
        return own, own
    public = conf(spark, "spark.driver.host") or "127.0.0.1"
    bind = conf(spark, "spark.driver.bindAddress") or public
    return public.strip("[]"), bind.strip("[]")  # Spark writes IPv6 addresses in brackets


def address_of(host: str) -> str:
    """An address of a host: ZeroMQ binds to addresses only, and the driver's host is often a name.

    Raises:
        OSError: the name is not known.
    """
    return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])


def _host_and_port(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)


def executor_addresses(spark: SparkSession) -> dict[str, tuple[str, int]]:
    """Host and port of every executor that Spark holds to be alive, by its name; none where it cannot tell."""
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
    """Host and port of those executors that have one; Spark knows one that is starting by its host alone."""
    return {name: _host_and_port(text) for name, text in executors.items() if re.search(r":\d+$", text)}
