"""hvd.progress on its own: what it counts, what it times, and what it reports."""

from __future__ import annotations

import math
import queue
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import spark_hvd.torch as hvd
from spark_hvd.context.progress import Progress, progress
from spark_hvd.world.activity import Activity, activity
from spark_hvd.world.vitals import PendingCollective, Vitals


@pytest.fixture(autouse=True)
def _nothing_before() -> Iterator[None]:
    activity.progress, activity.optimizer_steps = None, 0
    yield
    activity.progress = None


def facts(loop: Progress[object]) -> dict[str, object]:
    return loop.facts(time.monotonic())


def test_a_loop_counts_steps_and_samples_and_times_its_data() -> None:
    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for _ in range(3):
            time.sleep(0.02)
            yield torch.zeros(8, 2), torch.zeros(8)

    loop = progress(batches(), total=3, epoch=1, epochs=4, loss=0.5)
    seen = []
    for x, _ in loop:
        time.sleep(0.01)
        loop.report(loss=torch.tensor(0.25, requires_grad=True), accuracy=lambda: 0.75)
        seen.append((len(x), facts(loop)["step"]))
    assert seen == [(8, 0), (8, 1), (8, 2)]
    found = facts(loop)
    assert found["step"] == found["steps"] == found["total_steps"] == 3
    assert found["samples"] == 24
    assert (found["epoch"], found["epochs"], found["stage"]) == (1, 4, "train")
    assert found["metrics"] == {"loss": 0.25, "accuracy": 0.75}
    assert 0.06 <= found["data_seconds"] < found["watched_seconds"]  # type: ignore[operator]
    assert found["watched_seconds"] >= 0.09  # type: ignore[operator]
    assert found["fetching"] is None
    ended = found["watched_seconds"]
    time.sleep(0.01)
    assert facts(loop)["watched_seconds"] == ended


def test_steps_that_the_program_counts_itself() -> None:
    loop = progress(2, batch_size=16)
    loop.step(loss=1.0)
    loop.step(samples=5, loss=math.nan)
    found = facts(loop)
    assert (found["step"], found["samples"]) == (2, 21)
    assert math.isnan(found["metrics"]["loss"])  # type: ignore[index]
    assert len(loop) == 2


def test_a_run_that_goes_on_in_the_middle() -> None:
    loop = progress(range(18), total=30, initial=12)
    assert facts(loop)["step"] == 12
    for _ in loop:
        pass
    found = facts(loop)
    assert (found["step"], found["steps"], found["total_steps"]) == (30, 30, 18), "steps of this process alone"


def test_totals_go_on_from_loop_to_loop_and_nested_loops_count_once() -> None:
    for epoch in progress(range(2)):
        for _ in progress([torch.zeros(4)] * 3, epoch=epoch):
            pass
    assert activity.progress is not None
    found = facts(activity.progress)
    assert (found["total_steps"], found["samples"], found["step"]) == (6, 24, 3)


def test_steps_before_the_first_loop_stay_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activity, "optimizer_steps", 5)
    loop = progress(range(2))
    for _ in loop:
        pass
    assert (facts(loop)["total_steps"], facts(loop)["step"]) == (7, 2)


def test_a_loop_that_is_left_early_has_ended() -> None:
    loop = progress([1, 2, 3])
    for _ in loop:
        break
    before = facts(loop)["watched_seconds"]
    time.sleep(0.01)
    assert facts(loop)["watched_seconds"] == before


def test_waiting_for_a_batch_is_seen_while_it_lasts() -> None:
    loop = progress(iter([1]))
    with loop.fetching():
        time.sleep(0.02)
        found = facts(loop)
    assert found["fetching"] >= 0.02  # type: ignore[operator]
    assert found["data_seconds"] >= 0.02  # type: ignore[operator]


def test_a_batch_may_be_anything() -> None:
    samples = []
    for batch in ({"x": torch.zeros(7, 1)}, [torch.zeros(2)], (), 5, "text", torch.tensor(1.0)):
        activity.progress = None
        loop = progress([batch])
        for _ in loop:
            pass
        samples.append(facts(loop)["samples"])
    assert samples == [7, 2, 0, 0, 0, 0]


def test_a_metric_that_cannot_be_read_is_left_out() -> None:
    loop = progress(1, loss=lambda: None, accuracy=1)
    assert facts(loop)["metrics"] == {"accuracy": 1.0}


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: progress(3, total=4), ValueError, r"progress\(3, total=4\): two numbers"),
        (lambda: progress(-1), ValueError, "total=-1: expected a number from 0"),
        (lambda: progress(epoch=-2), ValueError, "epoch=-2"),
        (lambda: progress(3, initial=4), ValueError, "initial=4, total=3: expected at most the total"),
        (lambda: progress(3.5), TypeError, "expected an iterable"),
        (
            lambda: progress(3).report(loss=torch.zeros(2)),
            ValueError,
            r"loss: a tensor of shape \(2,\).*loss=value.mean",
        ),
        (lambda: iter(progress(3)).__next__(), TypeError, r"call \.step\(\) after each step"),
        (lambda: progress([1]).step(), TypeError, r"call \.report\(loss=\.\.\.\) instead"),
        (lambda: len(progress(iter([]))), TypeError, "pass total= to hvd.progress"),
    ],
)
def test_wrong_calls(call: object, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()  # type: ignore[operator]


def test_a_loader_without_a_length() -> None:
    class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[int]:
            return iter(range(4))

    loop = progress(torch.utils.data.DataLoader(Stream(), batch_size=2))
    assert [len(batch) for batch in loop] == [2, 2]
    assert facts(loop)["steps"] is None
    assert facts(loop)["samples"] == 4


def test_what_is_in_flight_is_told_oldest_first() -> None:
    class NegotiatedQueue:
        def pending(self, now: float) -> list[PendingCollective]:
            return [PendingCollective(f"allreduce '{number}'", float(number)) for number in range(20)]

    queue, mine = NegotiatedQueue(), Activity()
    mine.add_source(queue)
    with mine.waiting("barrier"):
        found = mine.pending(time.monotonic())
        assert [one.name for one in found] == [f"allreduce '{number}'" for number in range(19, 11, -1)]
        del queue
        (one,) = mine.pending(time.monotonic())
    assert one.name == "barrier"
    assert mine.pending(time.monotonic()) == []
    waited = mine.waited(time.monotonic())
    assert 0 < waited == mine.waited(time.monotonic())
    mine.wait_begins(10.0)
    assert mine.waited(12.0) == waited + 2.0  # even while it lasts
    assert (mine.entered, mine.last) == (1, ("barrier",))


def test_vitals_travel() -> None:
    vitals = Vitals(
        1, 2, 3, 4.5, pending=(PendingCollective("a", 1.0, (0, 1)), PendingCollective("b", 2.0)), metrics={"loss": 1.0}
    )
    message = vitals.to_message()
    assert Vitals.from_message({**message, "of a newer version": 1}) == vitals


def test_a_world_is_told_of_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from spark_hvd.runner.rank import reporting

    monkeypatch.setattr(reporting, "_YOUNG", 0.0)
    monkeypatch.setattr(reporting, "HEARTBEAT_SECONDS", 600.0)
    told: queue.Queue[dict[str, Any]] = queue.Queue()
    hvd.shutdown()
    hvd.init()
    monkeypatch.setattr(activity, "watched", False)
    activity.news.clear()
    reports = reporting.VitalsSender(lambda kind, vitals: told.put(vitals))
    reports.start()
    try:
        assert not told.get(timeout=30)["ended"]
        hvd.shutdown()
        hvd.init()
        assert not told.get(timeout=30)["ended"]
    finally:
        reports.stop()
        hvd.shutdown()
    assert told.get(timeout=30)["ended"]


def test_a_world_of_one_can_be_observed() -> None:
    from spark_hvd.context.observe import observe

    hvd.shutdown()
    assert observe() is None
    hvd.init()
    try:
        hvd.allreduce(torch.ones(1), name="x")
        found = observe()
        assert found is not None
        assert (found.rank, found.size, found.last) == (0, 1, "allreduce 'x'")
        assert found.memory_bytes > 1 << 20
        assert found.stall_warning == 60.0
    finally:
        hvd.shutdown()


def test_the_means_of_an_epoch_are_not_those_of_its_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    from spark_hvd.estimators.training import train
    from spark_hvd.estimators.training.history import History

    monkeypatch.setattr(train.hvd, "generation", lambda: 0)
    monkeypatch.setattr(train.hvd, "rank", lambda: 1)
    training = progress(range(3), epoch=0)
    list(training)
    list(progress(range(2), epoch=0, stage="validation"))
    job: Any = SimpleNamespace(history=History(), progress=training, background_validation=None)
    train.Job.add(job, {"loss": 0.5, "val_loss": 0.25})
    assert activity.progress is not None
    found = facts(activity.progress)
    assert (found["stage"], found["metrics"]) == ("train", {"loss": 0.5, "val_loss": 0.25})
    list(progress(range(3), epoch=1))
    assert facts(activity.progress)["total_steps"] == 3 + 2 + 3


def test_the_last_values_of_an_epoch_are_told_once_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = Activity()
    mine.watched = True
    monkeypatch.setattr("spark_hvd.context.progress.activity", mine)

    def epoch(number: int, loss: float, accuracy: float) -> None:
        for _ in (bar := progress([0], epoch=number)):
            bar.report(loss=torch.tensor(loss))
        for _ in (bar := progress([0], stage="validation")):  # from the same epoch, as it names none
            bar.report(accuracy=lambda: accuracy)

    def told() -> list[Any]:
        return list(mine.epochs_done(time.monotonic()))

    epoch(0, 4.0, 0.25)
    assert told() == []
    epoch(1, 2.0, 0.5)
    first = {"epoch": 1, "loss": 4.0, "validation/accuracy": 0.25}
    assert told() == [first]
    epoch(1, 1.0, 0.75)  # again, as after a loss
    epoch(0, 8.0, 0.0)  # from further back: the abandoned one does not count as a finished epoch
    assert told() == [first]
    mine.end_loop(last=True)
    assert told() == [first, {"epoch": 1, "loss": 8.0, "validation/accuracy": 0.0}]
    mine.add_epoch({"epoch": 1, "loss": 3.0})  # a fit reports means itself
    epoch(1, 2.0, 0.5)
    mine.end_loop(last=True)
    assert len(told()) == 3


def test_nobody_is_told_of_epochs_where_nobody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = Activity()
    monkeypatch.setattr("spark_hvd.context.progress.activity", mine)
    for number in range(2):
        progress(3, epoch=number, loss=lambda: pytest.fail("it is not asked for"))
    assert mine.epochs_done(time.monotonic()) == []
