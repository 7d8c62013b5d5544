"""What the Spark UI shows of our jobs, read from its status store."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import cloudpickle
import pytest

from spark_hvd.estimators import Store
from spark_hvd.runner import RankFailedError, RunError, run, run_elastic
from spark_hvd.runner.spark.private import items
from tests.conftest import wait_until
from tests.spark.estimator_support import estimator, frame

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

pytestmark = pytest.mark.usefixtures("no_leaks")
cloudpickle.register_pickle_by_value(sys.modules[__name__])
GROUP, DESCRIPTION, PLACE = "spark.jobGroup.id", "spark.job.description", "callSite.short"


@dataclass(frozen=True)
class Shown:
    """A job, as the UI shows it."""

    number: int
    group: str | None
    description: str | None
    stage: str
    details: str


def jobs(spark: SparkSession) -> Iterator[Any]:
    """Yield the jobs of the application, newest first. Asking for all of them would take seconds."""
    context: Any = spark.sparkContext._jsc.sc()
    context.listenerBus().waitUntilEmpty()
    found = context.statusStore().jobsList(None)
    yield from map(found.apply, range(found.size()))


def shown(spark: SparkSession, after: int) -> list[Shown]:
    """Return jobs with greater numbers, oldest first."""

    def value(option: Any) -> Any:
        return option.get() if option.isDefined() else None

    found = []
    for job in takewhile(lambda job: job.jobId() > after, jobs(spark)):
        stages = items(job.stageIds())  # a job without tasks has none
        if stages:
            stage = spark.sparkContext._jsc.sc().statusStore().lastStageAttempt(max(stages))
            found.append(
                Shown(job.jobId(), value(job.jobGroup()), value(job.description()), stage.name(), stage.details())
            )
    return sorted(found, key=lambda job: job.number)


@pytest.fixture
def before(spark: SparkSession) -> Iterator[int]:
    """Return the last job of other tests; afterwards this thread must have its earlier names."""
    context = spark.sparkContext
    names = [context.getLocalProperty(name) for name in (GROUP, DESCRIPTION, PLACE)]
    yield next((job.jobId() for job in jobs(spark)), -1)
    assert [context.getLocalProperty(name) for name in (GROUP, DESCRIPTION, PLACE)] == names


def train() -> int:
    return 1


def test_a_run(spark: SparkSession, before: int) -> None:
    assert run(train, num_proc=2, spark=spark, verbose=0) == [1, 1]
    (job,) = shown(spark, before)
    assert job.description == "spark_hvd: train on 2 ranks"
    assert job.group is not None
    assert job.group.startswith("spark_hvd-")
    assert job.stage.startswith("train on 2 ranks at test_ui_names.py:")
    assert "in test_a_run" in job.details


def test_an_elastic_run(spark: SparkSession, before: int) -> None:
    assert run_elastic(train, num_proc=1, max_num_proc=2, spark=spark, verbose=0) == [1, 1]
    (job,) = shown(spark, before)
    assert job.description == "spark_hvd: train on 1 to 2 ranks, elastic"


@pytest.fixture
def named(spark: SparkSession) -> Iterator[None]:
    """Name jobs as a user does."""
    spark.sparkContext.setJobGroup("mine", "my own words")
    yield
    for name in (GROUP, DESCRIPTION, "spark.job.interruptOnCancel"):
        spark.sparkContext.setLocalProperty(name, None)  # type: ignore[arg-type]


@pytest.mark.usefixtures("named")
def test_the_users_group_is_kept_and_his_words_come_back(spark: SparkSession, before: int) -> None:
    run(train, num_proc=2, spark=spark, verbose=0)
    spark.range(1).count()
    ours, *his = shown(spark, before)
    assert (ours.group, ours.description) == ("mine", "my own words (spark_hvd: train on 2 ranks)")
    assert ours.stage.startswith("train on 2 ranks at test_ui_names.py:")
    assert {(job.group, job.description) for job in his} == {("mine", "my own words")}


def sleep_long() -> None:
    import time

    time.sleep(60)


@pytest.mark.usefixtures("named")
def test_the_users_group_cancels_the_run(spark: SparkSession, before: int) -> None:
    def cancel() -> None:
        wait_until(lambda: shown(spark, before), 30)
        spark.sparkContext.cancelJobGroup("mine")

    other = threading.Thread(target=cancel)
    other.start()
    with pytest.raises(RunError, match=r"was cancelled, but not by spark_hvd: .*cancelled job group mine"):
        run(sleep_long, num_proc=2, spark=spark, verbose=0)
    other.join()


@pytest.mark.slow
def test_an_estimator_and_its_model(spark: SparkSession, before: int, tmp_path: Path) -> None:
    df = frame(spark)
    trained = estimator(store=Store.create(tmp_path), epochs=1).fit(df)
    fit = shown(spark, before)
    looks, writes, trains = dict.fromkeys(job.description for job in fit)
    assert looks == "spark_hvd: TorchEstimator looks at 32 rows"
    assert writes is not None
    assert writes.startswith(f"spark_hvd: TorchEstimator writes its data to {tmp_path}/intermediate_data/")
    assert trains == "spark_hvd: TorchEstimator on 2 ranks"
    assert len({job.group for job in fit}) == 1
    assert str(fit[0].group).startswith("TorchEstimator_")
    assert all(".py:" in job.stage and "threading.py" not in job.stage for job in fit)
    # what the user does with the model are the user's jobs
    trained.transform(df).collect()
    assert {(job.group, job.description) for job in shown(spark, fit[-1].number)} == {(None, None)}


def test_names_come_back_after_an_error(spark: SparkSession, before: int) -> None:
    with pytest.raises(RankFailedError):
        run(lambda: 1 / 0, num_proc=2, spark=spark, verbose=0)
    (job,) = shown(spark, before)
    assert job.description is not None
    assert job.description.endswith("<lambda> on 2 ranks")
