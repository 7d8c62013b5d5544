"""Every private name of PySpark and of Spark's JVM, used once; and Spark's silence is noticed, once."""

from __future__ import annotations

import inspect
import json
import logging
import os
import re
import sys
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import cloudpickle
import psutil
import pyarrow as pa
import pytest
from pyspark.ml.param import Params
from pyspark.resource import ResourceProfile, ResourceProfileBuilder, TaskResourceRequests

from spark_hvd.estimators.data import reuse
from spark_hvd.runner import RankFailedError, run
from spark_hvd.runner.cli import session as cli_session
from spark_hvd.runner.spark import job as spark_job
from spark_hvd.runner.spark import private as spark_private
from spark_hvd.runner.spark import session as on_spark
from spark_hvd.runner.spark.names import call_site, job_named
from spark_hvd.runner.spark.profiles import ResourceRequest, task_resources
from spark_hvd.runner.spark.slots import wait_for_slots
from tests.conftest import wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.usefixtures("no_leaks")
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def test_spark_says_nothing_against_the_way_in_which_every_run_starts(spark: SparkSession) -> None:
    """Runs start by ``mapInArrow(barrier=True)``, which SPARK-55278 wants to replace; the second way still works."""
    todo = "Spark does not want mapInArrow(barrier=True) any more: see 'If `mapInArrow` is removed' in DESIGN.md"
    called = spark.range(0, 2, 1, 2).mapInArrow
    assert "barrier" in inspect.signature(called).parameters, todo
    assert not re.search("deprecated|will be removed", called.__doc__ or "", re.IGNORECASE), todo
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert called(lambda batches: batches, "id long", barrier=True).count() == 2
    assert [str(each.message) for each in said if "mapInArrow" in str(each.message)] == [], todo
    ranks = spark.sparkContext.parallelize(range(2), 2).barrier()
    assert ranks.mapPartitions(lambda numbers: [list(numbers)]).collect() == [[0], [1]], "the second way is gone"


def test_the_application(spark: SparkSession) -> None:
    heap, limit = spark_private.heap_and_result_limit(spark)
    assert heap > 1 << 26
    assert limit == 1 << 30
    assert spark_private.network_timeout(spark) == 120
    assert Path(spark_private.temporary_folder(spark)).is_dir()
    assert spark_private.task_slots(spark, None) == 2
    assert spark_private.count_executors(spark) == 0
    assert spark_private.executor_ports(spark) == {}
    assert spark_private.qualified(spark, "/models") == "file:/models"
    times = pa.schema({"here": pa.timestamp("us"), "at": pa.timestamp("us", "UTC")})
    assert spark_private.spark_schema(times).simpleString() == "struct<here:timestamp_ntz,at:timestamp>"


def test_python_workers(spark: SparkSession, tmp_path: Path) -> None:
    shipped = tmp_path / "shipped.py"
    shipped.write_text("")
    spark.sparkContext.addPyFile(str(shipped))

    def look(batches: Any) -> Any:
        import pyarrow

        for _ in batches:
            pass
        java = [parent.pid for parent in psutil.Process().parents() if parent.name() == "java"]
        said = {"jvm": java[0], "env": dict(os.environ), "path": sys.path, "python": sys.executable}
        yield pyarrow.RecordBatch.from_pydict({"said": [json.dumps(said)]})

    frame = spark.range(0, 1, 1, 1).mapInArrow(look, "said string")
    said = json.loads(frame.collect()[0][0])
    jvm, environ, path = spark_private.local_workers(spark)
    environ.pop("LD_LIBRARY_PATH", None)  # cv2 changes it in each process that imports it
    assert (jvm, spark.sparkContext.pythonExec) == (said["jvm"], said["python"])
    assert {name: said["env"].get(name) for name in environ} == environ
    assert path == said["path"][: len(path)]


def test_profiles(spark: SparkSession) -> None:
    manager = spark_private.java_context(spark).resourceProfileManager()
    default = ResourceProfile(_java_resource_profile=manager.resourceProfileFromId(0))
    assert spark_private.known_profile(spark, default).id == 0
    assert spark_private.task_slots(spark, default) == 2
    with pytest.raises(Exception, match="only supported for"):  # in local mode; test_gpus has them on a cluster
        spark_private.known_profile(spark, ResourceProfileBuilder().require(TaskResourceRequests().cpus(2)).build)


def test_tasks_while_they_run(spark: SparkSession, tmp_path: Path) -> None:
    over = tmp_path / "over"

    def wait(batches: Any) -> Any:
        wait_until(over.exists)
        yield from batches

    def job() -> None:
        spark.sparkContext.addJobTag("private-names")
        spark.range(0, 1, 1, 1).mapInArrow(wait, "id long").collect()

    assert spark_private.tasks_of(spark, "private-names") == []
    thread = threading.Thread(target=job)
    thread.start()
    try:
        (task,) = wait_until(lambda: spark_private.tasks_of(spark, "private-names"))
        assert (task.partition, task.status, task.executor) == (0, "RUNNING", "driver")
        assert spark_private.decommissioned(spark, {"driver"}) == set()
    finally:
        over.touch()
        thread.join()


def test_call_sites(spark: SparkSession) -> None:
    frame = spark.range(1)
    with job_named(frame, "named", *call_site("named")):
        frame.collect()
        assert spark.sparkContext.getLocalProperty(spark_private.CALL_SITE).startswith("named at ")
    assert type(frame._sc) is type(spark.sparkContext)


def test_parameters() -> None:
    class Some(Params):
        rate = spark_private.unowned_param("rate", "How fast.")

    some = Some()
    spark_private.set_defaults(some, {"rate": 1})
    spark_private.rename(some, "other")
    assert spark_private.values_and_defaults(some) == ({}, {"rate": 1})
    assert (some.uid, some.rate.parent) == ("other", "other")
    assert spark_private.values_and_defaults(some.copy({some.rate: 2})) == ({"rate": 2}, {"rate": 1})


def test_plans(spark: SparkSession, tmp_path: Path) -> None:
    path = str(tmp_path / "data")
    spark.range(4).write.parquet(path)
    kept = spark.range(3).cache()
    kept.count()
    files = spark_private.reads(spark.read.parquet(path).filter("id > 1"))
    assert files is not None
    assert [part[0] for part in files[5:]] == ["files"]
    for frame, kind in (
        (spark.range(2), "range"),
        (spark.createDataFrame([(1,)], ["id"]), "LogicalRDD"),
        (spark.sql("select * from values (1), (2)"), "LocalRelation"),
        (kept, "InMemoryRelation"),
    ):
        found = spark_private.reads(frame)
        assert found is not None
        assert kind in [part[0] for part in found[5:]]
    assert spark_private.reads(spark.sql("select now()")) is None
    kept.unpersist()


def renamed(spark: SparkSession, method: str) -> Any:
    """Make Scala's SparkContext lack a method, as on a Spark that renamed it."""
    real = spark_private.java_context(spark)

    class Context:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, f"{name}OfOld" if name == method else name)

    return Context()


@pytest.fixture
def untold(spark: SparkSession, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Any:
    monkeypatch.setattr(spark_private, "_warned", set())
    context = renamed(spark, "statusStore")
    monkeypatch.setattr(spark_private, "java_context", lambda _: context)
    caplog.set_level(logging.WARNING, logger="spark_hvd")
    return lambda: [record.getMessage() for record in caplog.records if "does not tell" in record.getMessage()]


def test_without_word_of_executors_runs_go_on_after_one_warning(spark: SparkSession, untold: Any) -> None:
    def fails() -> None:
        raise ValueError("bad batch")

    for _ in range(2):
        with pytest.raises(RankFailedError, match="bad batch"):
            run(fails, num_proc=2, spark=spark, verbose=0)
        assert on_spark.executor_addresses(spark) == {}
    executors, tasks, stage = sorted(untold())
    assert f"Spark {spark.version} does not tell where tasks are (Py4JError: " in tasks
    assert "statusStoreOfOld([]) does not exist" in tasks
    assert "does not tell where executors are" in executors
    for line in (executors, tasks):
        assert "A host that stops answering is noticed only when Spark's timeouts end" in line
    assert "which stage a run is" in stage
    assert "no link to the Spark UI" in stage


def test_without_word_of_tasks_elastic_runs_say_what_they_lose(spark: SparkSession, untold: Any) -> None:
    job = spark_job.TaskJob(spark, 1, lambda batches: iter(()), "untold", "untold-tasks", barrier=False)
    assert job.attempts() == job.attempts() == []
    job.wait(60)
    (line,) = untold()
    assert "lost executors by their silence alone" in line


def test_without_word_of_plans_fits_write_anew_after_one_warning(
    spark: SparkSession, untold: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spark_private, "_leaf", lambda spark, leaf: leaf.kindOfOld())
    assert reuse.fingerprint(spark.range(2)) is None
    assert reuse.fingerprint(spark.range(3)) is None
    (line,) = untold()
    assert "Each fit writes its data anew" in line


def test_what_spark_does_not_know_yet_is_no_news(spark: SparkSession, untold: Any) -> None:
    for error in (RuntimeError("java.util.NoSuchElementException: 7"), ConnectionRefusedError("the JVM has gone")):
        spark_private.does_not_tell(spark, "anything", "Nothing.", error)
    assert untold() == []


def test_files_for_executors(spark: SparkSession, tmp_path: Path) -> None:
    name = f"shipped_{os.getpid()}"
    (tmp_path / f"{name}.py").write_text("WORD = 'here'\n")
    cli_session.ship(spark, [str(tmp_path / f"{name}.py")])
    assert run(lambda: __import__(name).WORD, num_proc=1, spark=spark, verbose=0) == ["here"]


class Connect:
    """The part of a Spark Connect session that is used here."""

    def __init__(self) -> None:
        self.shipped: list[tuple[str, bool]] = []
        self.conf = SimpleNamespace(get=lambda key, default=None: default)

    def addArtifacts(self, path: str, *, pyfile: bool) -> None:  # noqa: N802 - Spark's name
        self.shipped.append((path, pyfile))


Connect.__module__ = "pyspark.sql.connect.session"


def test_connect_is_not_asked_for_slots_where_the_number_of_ranks_is_told(spark: SparkSession) -> None:
    session: Any = Connect()
    assert wait_for_slots(session, 3, 1.0, task_resources(spark, ResourceRequest())) == 3


def test_connect_takes_artifacts() -> None:
    session: Any = Connect()
    cli_session.ship(session, ["a.py"])
    assert session.shipped == [("a.py", True)]


def test_on_connect_before_spark_4_threads_inherit_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    session: Any = Connect()
    monkeypatch.setattr("pyspark.__version__", "3.5.9")
    assert spark_job.inheriting(session, test_parameters) is test_parameters
