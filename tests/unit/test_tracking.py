"""What a tracker receives from a run, and that it cannot disturb one."""

from __future__ import annotations

import logging
import sys
from typing import Any

import cloudpickle
import pytest

from spark_hvd import run_elastic_local, run_local
from spark_hvd.runner import MlflowTracker, RankFailedError, Reporting
from spark_hvd.runner.watch.summary import Summary
from spark_hvd.runner.watch.tracking import Tracking
from spark_hvd.world.vitals import Vitals
from tests.unit.test_history import vitals

pytestmark = pytest.mark.usefixtures("no_leaks")
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Recorder:
    """Keeps what it receives."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}
        self.records: list[Vitals] = []
        self.ends: list[tuple[BaseException | None, Summary | None]] = []

    def start(self, facts: Any) -> None:
        self.facts = dict(facts)

    def take(self, vitals: Vitals) -> None:
        self.records.append(vitals)

    def end(self, error: BaseException | None, summary: Summary | None) -> None:
        self.ends.append((error, summary))


class Broken:
    """Fails at every call."""

    def start(self, facts: Any) -> None:
        raise ConnectionError("no server")

    def take(self, vitals: Vitals) -> None:
        raise ValueError("cannot take it")

    def end(self, error: BaseException | None, summary: Summary | None) -> None:
        raise ValueError("nor end it")


def train() -> int:
    import spark_hvd.torch as hvd

    bar = hvd.progress(3, epoch=0)
    for _ in range(3):
        bar.step(loss=0.5, samples=8)
    return hvd.rank()


def fail() -> None:
    raise ValueError("bad batch")


@pytest.mark.slow
def test_a_run() -> None:
    tracker = Recorder()
    result = run_local(train, num_proc=2, reporting=Reporting(tracker=tracker), verbose=0)
    assert tracker.facts["function"] == "train"
    assert tracker.facts["num_proc"] == 2
    assert {"torch", "pyspark", "python", "spark_hvd", "backend"} <= tracker.facts.keys()
    assert {record.rank for record in tracker.records} == {0, 1}
    assert tracker.records[-1].metrics == {"loss": 0.5}
    assert tracker.ends == [(None, result.summary)]
    assert result.summary is not None


def test_an_elastic_run() -> None:
    tracker = Recorder()
    result = run_elastic_local(train, num_proc=2, reporting=Reporting(tracker=tracker), verbose=0)
    assert tracker.facts["num_proc"] == 2
    assert tracker.ends == [(None, result.summary)]


def test_a_run_that_fails() -> None:
    tracker = Recorder()
    with pytest.raises(RankFailedError) as failed:
        run_local(fail, num_proc=1, reporting=Reporting(tracker=tracker), verbose=0)
    assert tracker.ends == [(failed.value, None)]


def test_one_that_cannot_start_ends_the_run_before_it_begins() -> None:
    with pytest.raises(ConnectionError, match="no server"):
        run_local(train, num_proc=1, reporting=Reporting(tracker=Broken()))


def test_one_that_fails_later_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    tracking = Tracking(Broken())
    with caplog.at_level(logging.WARNING):
        tracking.take(vitals())
        tracking.take(vitals())
        tracking.end(None, None)
    assert [record.getMessage() for record in caplog.records] == [
        "tracker=Broken: ValueError: cannot take it; the run continues, but its record may be incomplete"
    ]
    Tracking(None).take(vitals())


@pytest.mark.parametrize("tracker", [MlflowTracker, 7])
def test_no_tracker(tracker: Any) -> None:
    with pytest.raises(TypeError, match=r"^tracker=.*expected an object"):
        run_local(train, num_proc=1, reporting=Reporting(tracker=tracker))
