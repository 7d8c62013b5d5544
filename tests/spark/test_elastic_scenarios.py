"""The scenarios of Horovod's elastic tests on Spark, on a real cluster: hosts join, leave, fail and are lost.

If a test says that something is detected, it or the next one shows the case with nothing to detect.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from spark_hvd.estimators import Store
from spark_hvd.runner import (
    ResetLimitError,
    StateLostError,
    TooFewRanksError,
    run_elastic,
)
from spark_hvd.testing import FaultPlan
from tests.elastic_jobs import Job, Result, checked, read, train
from tests.spark.elastic_cluster import ElasticCluster, Progress, directed, elastic_cluster
from tests.spark.estimator_support import estimator, frame
from tests.spark.test_elastic_fit import COUNTING, Counts, Notes, each_row_once_an_epoch

pytestmark = [pytest.mark.night, pytest.mark.timeout(300), pytest.mark.usefixtures("no_leaks")]
cloudpickle.register_pickle_by_value(sys.modules[__name__])

H2, H3, H4, H5 = (f"127.0.0.{number}" for number in (2, 3, 4, 5))


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ElasticCluster]:
    with elastic_cluster(tmp_path_factory.mktemp("elastic-cluster")) as cluster:
        yield cluster


@pytest.fixture
def progress(tmp_path: Path) -> Progress:
    return Progress(tmp_path)


def launch(hosts: ElasticCluster, job: Job | FaultPlan, **options: Any) -> Result:
    """Train for some epochs, with faults in the ranks only."""
    job = job if isinstance(job, Job) else Job(job)
    given = {"num_proc": 2, "timeout": 120, "verbose": 0, **options}
    return checked(run_elastic(train, [job], spark=hosts.session, **given))


def direct(
    hosts: ElasticCluster,
    progress: Progress,
    script: Callable[[Progress], None],
    *,
    late: tuple[int, int] | None = None,
    **options: Any,
) -> list[Result]:
    """Train for as long as a script changes the cluster."""
    job = Job(epochs=0, pause=0.02, log=str(progress.log), until=str(progress.until), late=late)
    given = {"num_proc": 2, "timeout": 200, "verbose": 0, **options}
    with directed(progress, script):
        results = run_elastic(train, [job], spark=hosts.session, **given)
    checked(results)
    return results


# ---- nothing happens, or nothing that matters -----------------------------------------------------------------------


@pytest.mark.night
def test_ranks_on_two_hosts_train_undisturbed(hosts: ElasticCluster) -> None:
    hosts.provide(h2=1, h3=2)
    results = run_elastic(train, [Job(epochs=3)], num_proc=3, reset_limit=0, spark=hosts.session, timeout=120)
    first = checked(results)
    assert set(first.worlds) == {(0, 3)}
    assert sorted(result.local for result in results) == [(0, 1), (0, 2), (1, 2)]
    assert {result.host for result in results} == {H2, H3}


@pytest.mark.night
def test_hosts_that_are_not_needed_come_and_go(hosts: ElasticCluster, progress: Progress) -> None:
    hosts.provide(h2=1, h3=1)

    def script(progress: Progress) -> None:
        progress.wait(lambda line: line.step >= 5)
        hosts.add_worker(H4)
        hosts.wait_for_slots(3)
        reached = read(progress.log)[-1].step
        progress.wait(lambda line: line.step >= reached + 20)
        hosts.kill_worker(H4)
        hosts.wait_for_slots(2)
        reached = read(progress.log)[-1].step
        progress.wait(lambda line: line.step >= reached + 20)

    first = direct(hosts, progress, script, reset_limit=0)[0]
    assert set(first.worlds) == {(0, 2)}


# ---- ranks fail -----------------------------------------------------------------------------------------------------


@pytest.mark.night
def test_a_rank_that_fails_is_replaced_on_its_host(hosts: ElasticCluster) -> None:
    hosts.provide(h2=1, h3=1)
    faults = FaultPlan().kill(rank=0, step=4)
    assert launch(hosts, faults, reset_limit=1).worlds == [(0, 2)] * 4 + [(1, 2)] * 8
    with pytest.raises(ResetLimitError):
        launch(hosts, faults, reset_limit=0)


# ---- hosts come and go ----------------------------------------------------------------------------------------------


@pytest.mark.night
def test_a_world_shrinks_with_the_cluster(hosts: ElasticCluster, progress: Progress) -> None:
    """One host is lost, which is a failure; one is decommissioned, which is not."""
    hosts.provide(h2=1, h3=1, h4=1)

    def script(progress: Progress) -> None:
        progress.wait(lambda line: line.step >= 5)
        hosts.kill_worker(H2)
        progress.wait(lambda line: line.size == 2)
        hosts.decommission_worker(H3)
        progress.wait(lambda line: line.size == 1)

    results = direct(hosts, progress, script, num_proc=3, min_num_proc=1, reset_limit=1)
    assert results[0].sizes == [3, 2, 1]
    assert [result.host for result in results] == [H4]


@pytest.mark.night
def test_hosts_are_exchanged_one_by_one_until_none_of_the_first_is_left(
    hosts: ElasticCluster, progress: Progress
) -> None:
    hosts.provide(h2=1, h3=1)

    def script(progress: Progress) -> None:
        progress.wait(lambda line: line.step >= 5)
        for old, new in ((H2, H4), (H3, H5)):
            hosts.add_worker(new)
            hosts.kill_worker(old)
            progress.wait(lambda line, new=new: line.size == 2 and line.host == new)  # type: ignore[misc]

    results = direct(hosts, progress, script, min_num_proc=1, reset_limit=2)
    assert {result.host for result in results} == {H4, H5}


@pytest.mark.night
@pytest.mark.parametrize("others_come", [False, True])
def test_all_hosts_are_lost(hosts: ElasticCluster, progress: Progress, others_come: bool) -> None:
    hosts.provide(h2=1, h3=1)

    def script(progress: Progress) -> None:
        progress.wait(lambda line: line.step >= 5)
        hosts.kill_worker(H2)
        hosts.kill_worker(H3)
        if others_come:
            hosts.add_worker(H4)
            hosts.add_worker(H5)

    error, text = (StateLostError, "all ranks that had the state") if others_come else (TooFewRanksError, "0 ranks for")
    with pytest.raises(error, match=text):
        direct(hosts, progress, script, elastic_timeout=60 if others_come else 3)


# ---- executors ------------------------------------------------------------------------------------------------------


@pytest.mark.night
def test_an_executor_that_is_killed_is_left_behind_at_once(hosts: ElasticCluster, progress: Progress) -> None:
    hosts.provide(h2=1, h3=1)

    def script(progress: Progress) -> None:
        progress.wait(lambda line: line.step >= 5)
        hosts.kill_executor(H3)
        progress.wait(lambda line: line.generation == 1)  # the next rank is late, so no rank waits for it
        progress.wait(lambda line: line.generation >= 2 and line.size == 2)

    first = direct(hosts, progress, script, late=(2, 1), min_num_proc=1, reset_limit=1)[0]
    assert first.sizes == [2, 1, 2]


def test_an_executor_that_is_decommissioned_is_no_failure(hosts: ElasticCluster, progress: Progress) -> None:
    hosts.provide(h2=1, h3=1)

    def script(progress: Progress) -> None:
        progress.wait(lambda line: line.step >= 5)
        hosts.decommission_executor(H2)
        left = progress.wait(lambda line: line.size == 1)
        progress.wait(lambda line: line.size == 2 and line.generation > left.generation)

    results = direct(hosts, progress, script, late=(2, 1), min_num_proc=1, reset_limit=0)
    assert results[0].sizes == [2, 1, 2]
    assert {result.host for result in results} == {H2, H3}


# ---- fits -----------------------------------------------------------------------------------------------------------


def test_a_fit_goes_on_without_a_lost_executor_and_with_its_replacement(
    hosts: ElasticCluster, progress: Progress, tmp_path: Path
) -> None:
    hosts.provide(h2=1, h3=1)
    df = frame(hosts.session)

    def script(progress: Progress) -> None:
        progress.wait(lambda line: line.step >= 10, 120)
        hosts.kill_executor(H3)
        progress.wait(lambda line: line.generation > 0 and line.size == 2, 120)

    settings = {**COUNTING, "num_proc": 2, "min_num_proc": 1, "max_num_proc": 2, "epochs": 5000}
    settings["callbacks"] = [Notes(progress.log, progress.until)]
    with pytest.raises(ValueError, match=r"store is missing: ranks that come and go \(max_num_proc\) read their rows"):
        estimator(Counts(), **settings).fit(df)
    with directed(progress, script):
        fitted = estimator(Counts(), **settings, store=Store.create(tmp_path / "store")).fit(df)
    each_row_once_an_epoch(fitted)
    assert fitted.getHistory().restarts >= 1
    assert {line.size for line in read(progress.log) if line.generation > 0} >= {1, 2}
