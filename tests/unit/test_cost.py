"""What a run cost, and the model of other numbers of ranks."""

from __future__ import annotations

import math

import pytest

from spark_hvd.runner.watch.cost import Cost
from spark_hvd.runner.watch.summary import Summary
from spark_hvd.runner.watch.view import RunView
from spark_hvd.world.vitals import Vitals

TWO = Cost(seconds=100.0, ranks=2, rank_seconds=200.0, divided=80.0, communication=15.0)
"""Five seconds of start."""


def seen(comm: tuple[float, ...], loops: float | None = None) -> RunView:
    """A rank for each of `comm`, the share of its time spent waiting for communication: 10 s of start, 300 steps.

    Args:
        comm: See above.
        loops: Share of the time inside of `hvd.progress` loops, a tenth of the whole waiting for data; None: no loops.
    """
    view, start = RunView("train", len(comm), 0.0), 10
    for second in range(start, 41):
        for rank, share in enumerate(comm):
            worked = second - start
            record = Vitals(
                rank=rank,
                size=len(comm),
                generation=0,
                clock=float(second),
                process=f"process {rank}",
                stage="" if loops is None else "train",
                total_steps=10 * worked,
                watched_seconds=worked * (loops or 0.0),
                data_seconds=0.0 if loops is None else 0.1 * worked,
                comm_seconds=worked * share,
            )
            view.take(record, float(second))
    return view


def cost_of(view: RunView, now: float = 40.0) -> Cost:
    cost = view.summary(now).cost
    assert cost is not None
    return cost


@pytest.mark.parametrize(
    ("ranks", "same", "fewer"),
    [(2, 100.0, 100.0), (4, 5 + 40 + 15 * 1.5, 5 + 40 + 7.5 * 1.5), (1, 5 + 160, 5 + 160), (math.inf, 5 + 30, 5)],
)
def test_the_rows_are_divided_and_a_ring_talks(ranks: float, same: float, fewer: float) -> None:
    assert TWO.seconds_with(ranks) == pytest.approx(same)
    assert TWO.seconds_with(ranks, same_steps=False) == pytest.approx(fewer)


@pytest.mark.parametrize("ranks", [0, 0.5, -2, math.nan])
def test_a_number_of_ranks_that_cannot_be(ranks: float) -> None:
    with pytest.raises(ValueError, match=r"^ranks=.*: expected a number of ranks, at least 1"):
        TWO.seconds_with(ranks)


def test_without_steps_there_is_no_prediction() -> None:
    cost = Cost(seconds=10.0, ranks=2, rank_seconds=20.0)
    assert cost.text() == "20.0 rank-seconds"
    with pytest.raises(ValueError, match=r"this run reported no steps.*hvd\.progress"):
        cost.seconds_with(4)


def test_the_line() -> None:
    assert TWO.text(0.06, 0.16) == (
        "200 rank-seconds, waiting 6 % for data and 16 % for communication; 4 ranks: about 1 min 08 s for 1.35 x the "
        "cost; 1 rank: about 2 min 45 s for 0.825 x the cost"
    )


def test_the_line_with_a_price_and_gpus() -> None:
    cost = Cost(3600.0, 2, 7200.0, gpu_seconds=7200.0, divided=3600.0, price_per_hour=4.5)
    assert cost.price == pytest.approx(9.0)
    assert cost.text() == (
        "7,200 rank-seconds and 7,200 GPU-seconds (9.00 at 4.50 an hour); 4 ranks: at least 30 min 00 s for 9.00; "
        "1 rank: at most 2 h 00 min for 9.00"
    )


def test_of_a_short_run_nothing_is_foretold() -> None:
    """Most of it was start-up, which no number of ranks shortens."""
    assert Cost(3.0, 2, 6.0, divided=1.0, communication=0.2).text() == "6.00 rank-seconds"


def test_where_more_ranks_do_not_help() -> None:
    cost = Cost(seconds=100.0, ranks=4, rank_seconds=400.0, divided=20.0, communication=60.0)
    assert cost.seconds_with(8) == pytest.approx(20 + 10 + 60 * 7 / 6)
    assert cost.text(None, 0.6).endswith("; more ranks do not help below 1 min 40 s")
    assert "do not help" not in TWO.text()


def test_of_a_run_the_start_is_nobodys_work() -> None:
    cost = cost_of(seen((0.25, 0.25)))
    assert (cost.seconds, cost.rank_seconds) == (40.0, 80.0)
    assert cost.divided == pytest.approx(0.75 * 30)
    assert cost.communication == pytest.approx(0.25 * 30)


def test_the_rank_that_the_others_wait_for_counts() -> None:
    cost = cost_of(seen((0.4, 0.1, 0.4)))
    assert (cost.divided, cost.communication) == (pytest.approx(0.9 * 30), pytest.approx(0.1 * 30))


def test_what_is_outside_of_loops_does_not_get_shorter() -> None:
    cost = cost_of(seen((0.2, 0.2), loops=0.8))
    assert (cost.divided, cost.communication) == (pytest.approx(0.6 * 30), pytest.approx(0.2 * 30))


def test_communication_that_was_not_seen_makes_a_bound() -> None:
    text = cost_of(seen((0.0, 0.0))).text()
    assert "4 ranks: at least 25 s" in text
    assert "1 rank: at most 1 min 10 s" in text
    alone = cost_of(seen((0.0,))).text()
    assert "2 ranks: at least 25 s" in alone
    assert alone.count(";") == 1


def test_ranks_that_come_and_go_are_added_up() -> None:
    view = RunView("train", 2, 0.0)
    for rank in range(2):
        view.take(Vitals(rank=rank, size=2, generation=0, clock=1.0, process=f"{rank}", total_steps=1), 1.0)
    for rank in range(3):
        view.take(Vitals(rank=rank, size=3, generation=1, clock=10.0, process=f"{rank}", total_steps=9), 10.0)
    cost = cost_of(view, 20.0)
    assert cost.rank_seconds == pytest.approx(2 * 10 + 3 * 10)
    assert cost.text() == "50.0 rank-seconds"


@pytest.mark.parametrize(("told", "given", "seconds"), [(None, None, 0.0), (1 << 20, None, 80.0), (1 << 20, 4, 320.0)])
def test_gpu_seconds(told: int | None, given: int | None, seconds: float) -> None:
    view = RunView("train", 2, 0.0, None, given)
    view.take(Vitals(rank=0, size=2, generation=0, clock=1.0, gpu_memory_bytes=told), 1.0)
    assert cost_of(view).gpu_seconds == seconds


def test_a_price_makes_a_summary_worth_showing_and_is_in_its_data() -> None:
    priced = RunView("train", 2, 0.0, 1800.0).summary(2.0)
    assert priced.worth_showing
    assert str(priced).endswith("\n  cost  4.00 rank-seconds (2.00 at 1,800 an hour)")
    assert priced.as_dict()["cost"]["price"] == pytest.approx(2.0)
    assert Summary("train", 1.0, 2).as_dict()["cost"] is None
