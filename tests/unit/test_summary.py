"""The summary of a run: its figures and its text."""

from __future__ import annotations

import math
import pickle
from html.parser import HTMLParser

import pytest

from spark_hvd.runner.watch.snapshot import Slowest
from spark_hvd.runner.watch.summary import Share, Summary
from spark_hvd.runner.watch.view import RunView
from spark_hvd.world.vitals import Vitals

FULL = Summary(
    title="train on 8 ranks",
    seconds=751.0,
    ranks=8,
    steps=1250,
    samples=640_000,
    samples_per_second=852.2,
    steady_samples_per_second=903.9,
    data=Share(0.06, 0.14, 3),
    communication=Share(0.16, 0.21, 0),
    compute=Share(0.78, 0.85, 5),
    effective_training_time=0.874,
    lost_training_time=0.021,
    restarts=1,
    changes=2,
    metrics={"loss": 0.12341, "accuracy": 0.98},
    slowest=Slowest(5, 1.24),
)


def told(seconds: int, *, start: int = 0, comm: float = 0.2, **facts: object) -> RunView:
    """Return two ranks that make ten steps a second, of which rank 1 waits for data."""
    view = RunView("train on 2 ranks", 2, 0.0)
    for second in range(seconds + 1):
        for rank in range(2):
            worked = max(0, second - start)
            record = Vitals(
                rank=rank,
                size=2,
                generation=0,
                clock=100.0 + second,
                entered=second,
                stage="train",
                step=10 * worked,
                total_steps=10 * worked,
                samples=320 * worked,
                watched_seconds=worked,
                process=f"process {rank}",
                data_seconds=worked * (0.3 if rank else 0.1),
                comm_seconds=worked * comm,
                metrics={"accuracy": 0.5, "loss": 0.25},
            )
            view.take(Vitals(**{**record.to_message(), **facts, "pending": ()}), float(second))
    return view


def test_the_figures_of_a_run() -> None:
    summary = told(40).summary(40.0)
    assert (summary.title, summary.seconds, summary.ranks) == ("train on 2 ranks", 40.0, 2)
    assert summary.steps == 400
    assert summary.samples == 2 * 40 * 320
    assert summary.samples_per_second == pytest.approx(640)
    assert summary.data is not None
    assert (summary.data.mean, summary.data.most, summary.data.rank) == (pytest.approx(0.2), pytest.approx(0.3), 1)
    assert summary.communication is not None
    assert summary.communication.mean == pytest.approx(0.2)
    assert summary.compute is not None
    assert (summary.compute.mean, summary.compute.rank) == (pytest.approx(0.6), 0)
    assert summary.efficiency == pytest.approx(0.6)
    assert (summary.restarts, summary.changes) == (0, 0)
    assert list(summary.metrics.items()) == [("loss", 0.25), ("accuracy", 0.5)]
    assert summary.slowest is None


def test_the_start_does_not_count_where_it_says_so() -> None:
    summary = told(40, start=20).summary(40.0)
    assert summary.samples_per_second == pytest.approx(320)
    assert summary.effective_training_time == pytest.approx(0.5)
    assert summary.lost_training_time == 0
    assert summary.steady_samples_per_second == pytest.approx(640)
    assert summary.efficiency == pytest.approx(0.6)


def test_what_comes_after_the_last_step_does_not_count_in_the_shares() -> None:
    view = told(40)
    for rank in range(2):
        last = Vitals(
            rank=rank, size=2, generation=0, clock=240.0, stage="train", total_steps=400, process=f"process {rank}"
        )
        view.take(Vitals(**{**last.to_message(), "pending": (), "samples": 12800, "comm_seconds": 90.0}), 140.0)
    summary = view.summary(140.0)
    assert summary.communication is not None
    assert summary.communication.mean == pytest.approx(0.2)
    assert summary.steady_samples_per_second == pytest.approx(640)


def test_the_slowest_rank_of_the_whole_run() -> None:
    view = RunView("train on 3 ranks", 3, 0.0)
    for second in range(60):
        for rank in range(3):
            waited = second * (0.0 if rank == 1 else 0.4)
            facts = {"entered": second, "total_steps": second, "comm_seconds": waited, "stage": "train"}
            view.take(Vitals(rank=rank, size=3, generation=0, clock=float(second), **facts), float(second))
        if second == 3:
            assert view.summary(3.0).slowest is None  # after so few steps it would be chance
    slowest = view.summary(60.0).slowest
    assert slowest is not None
    assert (slowest.rank, slowest.skew) == (1, pytest.approx(1 / 0.6))


def test_without_progress_it_is_short() -> None:
    summary = told(40, stage="", total_steps=0, samples=0, data_seconds=0.0, metrics={}).summary(45.0)
    assert summary.steps == 0
    assert summary.effective_training_time is None
    assert summary.samples_per_second is None
    assert summary.efficiency is None
    assert summary.communication is not None
    assert str(summary).splitlines() == [
        "train on 2 ranks",
        "  time           45 s on 2 ranks",
        "  communication  20 % of the time waiting",
        "  cost           90.0 rank-seconds, waiting 20 % for communication",
    ]


def test_communication_that_is_next_to_nothing_is_not_told() -> None:
    view = told(40, comm=0.001)
    assert view.summary(40.0).communication is None
    snapshot = view.snapshot(40.0)
    assert [snapshot.communication, *(row.communication for row in snapshot.rows)] == [None] * 3
    assert snapshot.compute == pytest.approx(0.8, abs=0.01)


def test_of_a_run_that_told_nothing() -> None:
    summary = RunView("train on 2 ranks", 2, 10.0).summary(12.5)
    assert str(summary) == "train on 2 ranks\n  time  2.5 s on 2 ranks\n  cost  5.00 rank-seconds"
    assert not summary.worth_showing
    assert told(40).summary(40.0).worth_showing
    assert RunView("train", 2, 0.0).summary(31.0).worth_showing


def test_it_reads_well() -> None:
    assert str(FULL) == (
        "train on 8 ranks\n"
        "  time           12 min 31 s on 8 ranks, 1250 steps\n"
        "  samples        640,000, 852 a second (904 without the start)\n"
        "  ETT            87 % of the ranks' time was effective training time, 2 % went into steps that were lost\n"
        "  compute        78 % of the time (rank 5: 85 %)\n"
        "  data           6 % of the time waiting (rank 3: 14 %)\n"
        "  communication  16 % of the time waiting (rank 0: 21 %)\n"
        "  slowest        rank 5: 1.24 times the median rank's own time a step\n"
        "  interrupted    1 restart, 2 changes of membership\n"
        "  metrics        loss 0.1234, accuracy 0.9800"
    )


def test_it_pickles_and_is_plain_data() -> None:
    assert pickle.loads(pickle.dumps(FULL)) == FULL
    plain = FULL.as_dict()
    assert plain["efficiency"] == 0.78
    assert plain["data"] == {"mean": 0.06, "most": 0.14, "rank": 3}
    assert plain["slowest"] == {"rank": 5, "skew": 1.24}
    assert plain["metrics"] == {"loss": 0.12341, "accuracy": 0.98}
    assert Summary("train", 1.0, 2).as_dict()["samples_per_second"] is None


def test_in_a_notebook_everything_is_escaped() -> None:
    class Texts(HTMLParser):
        def __init__(self) -> None:
            super().__init__()
            self.tags: list[str] = []
            self.texts: list[str] = []

        def handle_starttag(self, tag: str, attrs: object) -> None:
            self.tags.append(tag)

        def handle_data(self, data: str) -> None:
            self.texts.append(data)

    parser = Texts()
    summary = Summary("<script>f</script> & co", 2.0, 2, steps=1, metrics={"<b>loss": math.nan})
    parser.feed(summary._repr_html_())
    assert "script" not in parser.tags
    assert "<script>f</script> & co" in parser.texts
    assert "<b>loss nan" in parser.texts
