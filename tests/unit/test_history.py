"""The history of a run: what is kept, differences across processes and worlds, and its bounded size."""

from __future__ import annotations

import math
import pickle
from itertools import pairwise
from typing import Any

import pytest

from spark_hvd.runner.watch.history import _LEAST_POINTS, MOST_POINTS, Generation, RunHistory
from spark_hvd.runner.watch.rates import goes_on, grown, rates
from spark_hvd.world.vitals import Vitals


def vitals(rank: int = 0, at: float = 0.0, **changed: Any) -> Vitals:
    """Return a rank with ten steps of 32 samples a second; a tenth waiting for data, a fifth communicating."""
    told: dict[str, Any] = {
        "size": 2,
        "generation": 0,
        "clock": 50 + at,
        "process": f"process {rank}",
        "stage": "train",
        "total_steps": int(10 * at),
        "samples": int(320 * at),
        "watched_seconds": 0.9 * at,
        "data_seconds": 0.1 * at,
        "comm_seconds": 0.2 * at,
        "cpu_seconds": 1.5 * at,
        "metrics": {"loss": 1 / (1 + at)},
    }
    return Vitals(rank, **{**told, **changed})


def history_of(*told: tuple[float, Vitals]) -> RunHistory:
    history = RunHistory()
    for at, each in told:
        history.take(each, 1000 + at)
    return history


def test_rates_are_differences_by_the_ranks_own_clock() -> None:
    found = rates(grown(vitals(at=1), vitals(at=3)))
    assert found is not None
    assert (found.seconds, found.samples_per_second, found.steps_per_second) == (2, 320, 10)
    assert (found.data, found.communication, found.compute, found.cpu) == pytest.approx((0.1, 0.2, 0.6, 1.5))


@pytest.mark.parametrize(
    "after",
    [vitals(at=2, generation=1), vitals(at=2, process="another")],
    ids=["another world", "a new process"],
)
def test_no_rates_where_differences_mean_nothing(after: Vitals) -> None:
    assert goes_on(vitals(at=1), vitals(at=2))
    assert not goes_on(vitals(at=1), after)
    assert [point.rates for point in history_of((0, vitals(at=1)), (1, after)).points(0)] == [None, None]


def test_no_rates_where_no_time_has_passed() -> None:
    assert rates(grown(vitals(at=1), vitals(at=1))) is None


def test_a_rank_that_enters_its_first_world_goes_on() -> None:
    assert goes_on(vitals(at=1, generation=-1), vitals(at=2))


def test_parts_never_exceed_the_whole() -> None:
    told = vitals(at=1, watched_seconds=3.0, data_seconds=2.0, comm_seconds=5.0, total_steps=0, samples=0)
    found = rates(grown(vitals(at=0), told))
    assert found is not None
    assert (found.data, found.communication, found.compute) == (1.0, 0.0, 0.0)


def test_points_of_each_rank() -> None:
    history = history_of(*((at + rank / 10, vitals(rank, at, epoch=at)) for at in range(3) for rank in range(2)))
    assert history.ranks == [0, 1]
    assert history.metrics == ["loss"]
    assert history.seconds == pytest.approx(2.1)
    points = history.points(1)
    assert [point.seconds for point in points] == pytest.approx([0.1, 1.1, 2.1])
    assert [point.epoch for point in points] == [0, 1, 2]
    assert [point.total_steps for point in points] == [0, 10, 20]
    assert points[0].rates is None
    assert points[2].rates is not None
    assert points[2].metrics == {"loss": 1 / 3}
    with pytest.raises(KeyError, match=r"rank 7: the history has ranks \[0, 1\]"):
        history.points(7)


def test_a_restart_adds_to_the_steps_and_has_no_rate_over_the_gap() -> None:
    history = history_of(
        (0, vitals(at=1)),
        (1, vitals(at=2)),
        (9, vitals(at=0, clock=60, generation=1, process="new")),
        (10, vitals(at=1, clock=61, generation=1, process="new")),
    )
    assert [point.total_steps for point in history.points(0)] == [10, 20, 20, 30]
    assert [point.rates is None for point in history.points(0)] == [True, False, True, False]
    assert history.generations == [Generation(0, 2, 0), Generation(1, 2, 9)]


def test_a_rank_that_comes_later_starts_where_the_others_are() -> None:
    history = history_of((0, vitals(at=5)), (1, vitals(at=6, generation=1)), (1, vitals(1, at=0, generation=1)))
    assert history.points(1)[0].total_steps == 60


def test_a_rank_that_is_replaced_goes_on_where_the_others_are() -> None:
    history = history_of(
        (0, vitals(0, at=5)),
        (0, vitals(1, at=5)),
        (3, vitals(0, at=8, generation=1)),
        (4, vitals(0, at=9, generation=2)),
        (4, vitals(1, at=0, generation=2, process="new")),
        (5, vitals(1, at=1, generation=2, process="new")),
    )
    assert [point.total_steps for point in history.points(1)] == [50, 90, 100]


def test_records_of_a_world_that_is_over_are_left_out() -> None:
    history = history_of((0, vitals(at=0, generation=1, size=1)), (1, vitals(1, at=9)))
    assert history.ranks == [0]
    assert history.generations == [Generation(1, 1, 0)]


def test_values_that_are_not_known() -> None:
    (point,) = history_of((0, vitals(gpu_memory_bytes=7))).points(0)
    assert (point.epoch, point.gpu_memory_bytes, point.gpu_utilization) == (None, 7, None)


def test_metrics_that_come_later_and_go() -> None:
    history = history_of((0, vitals(metrics={})), (1, vitals(at=1, metrics={"a": 1.0})), (2, vitals(at=2, metrics={})))
    values = [point.metrics["a"] for point in history.points(0)]
    assert values[1] == 1
    assert math.isnan(values[0])
    assert math.isnan(values[2])


@pytest.mark.parametrize(("size", "most"), [(2, MOST_POINTS), (100_000, _LEAST_POINTS)])
def test_a_long_run_stays_small_evenly_spaced_and_true_in_its_sums(size: int, most: int) -> None:
    history = RunHistory()
    records = 5 * most + 37
    for second in range(records):
        history.take(vitals(at=second, size=size), 1000 + second)
        assert history.seconds == second  # the newest is always kept
    points = history.points(0)
    assert most / 3 < len(points) <= most
    gaps = [b.seconds - a.seconds for a, b in pairwise(points)]
    assert max(gaps) <= 2.5 * records / len(points)
    assert points[-1].total_steps == 10 * (records - 1)
    assert sum(
        point.rates.samples_per_second * point.rates.seconds for point in points if point.rates
    ) == pytest.approx(320 * (records - 1))


def test_it_pickles_and_goes_on() -> None:
    history = pickle.loads(pickle.dumps(history_of((0, vitals()), (1, vitals(at=1)))))
    history.take(vitals(at=2), 1002)
    assert [point.total_steps for point in history.points(0)] == [0, 10, 20]


def test_a_frame() -> None:
    frame = history_of((0, vitals()), (1, vitals(at=1))).to_pandas()
    assert frame.index.names == ["rank", "seconds"]
    assert frame["loss"].tolist() == [1.0, 0.5]
    assert frame["samples_per_second"].tolist()[1] == 320
    assert RunHistory().to_pandas().empty
