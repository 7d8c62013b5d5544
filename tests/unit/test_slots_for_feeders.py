"""The slots of feeders next to those of ranks, at the start and after a loss; and what is closed at the end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from spark_hvd.runner.config import RunConfig
from spark_hvd.runner.launch import feeding, restart
from spark_hvd.runner.launch.data import RunData
from spark_hvd.runner.launch.feeding import Feeding, SlotAllocation, allocate_slots, slots_left
from spark_hvd.runner.outcome.errors import ExecutorLostError, NotEnoughSlotsError

SESSION: Any = None
RANKS: Any = "ranks"
FEEDERS: Any = "feeders"
MAPS: Any = {"train": None}


def cluster(monkeypatch: pytest.MonkeyPatch, **slots: int) -> None:
    """A cluster with so many slots for each kind of task, which does not grow."""
    for module in (feeding, restart):
        monkeypatch.setattr(module, "task_slots", lambda _, resources: slots[resources])
        monkeypatch.setattr(module.on_spark, "is_local", lambda _: True)
        monkeypatch.setattr(module.on_spark, "executor_addresses", lambda _: {})
    monkeypatch.setattr(feeding, "task_resources", lambda *_: FEEDERS)


@pytest.mark.parametrize(
    ("feeders", "feeder_slots", "slots", "left"), [(4, 8, 8, 4), (4, 4, 4, 0), (4, 3, 3, 0), (2, 8, 4, 3), (1, 0, 0, 0)]
)
def test_slots_that_feeders_leave(feeders: int, feeder_slots: int, slots: int, left: int) -> None:
    assert slots_left(feeders, feeder_slots, slots) == left


@pytest.mark.parametrize(("slots", "ranks"), [(6, 2), (8, 4), (9, 4)])
def test_ranks_that_start_again_leave_room_for_feeders(slots: int, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster(monkeypatch, ranks=slots, feeders=slots)
    config = RunConfig(num_proc=4, feeders=4, max_restarts=1, min_num_proc=2)
    allocation = SlotAllocation(4, 4, resources=FEEDERS)
    assert restart.tasks_again(SESSION, config, RANKS, allocation, ExecutorLostError("lost")) == ranks


def test_no_room_for_both_after_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster(monkeypatch, ranks=4, feeders=4)
    config = RunConfig(num_proc=4, feeders=4, max_restarts=1, min_num_proc=2)
    with pytest.raises(NotEnoughSlotsError, match=r"0 of 4 ranks find a slot besides feeders=4 .*Allow fewer ranks or"):
        restart.tasks_again(SESSION, config, RANKS, SlotAllocation(4, 4, resources=FEEDERS), ExecutorLostError("lost"))
    assert restart.tasks_again(SESSION, config, RANKS, SlotAllocation(4), ExecutorLostError("lost")) == 4


@pytest.mark.parametrize(("notices", "ranks", "waited"), [(130.0, 1, 130.0), (20.0, 1, 60.0), (1e9, 2, 240.0)])
def test_no_rank_starts_on_a_host_that_spark_has_not_missed_yet(
    notices: float, ranks: int, waited: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    two = {"0": ("a", 1), "1": ("b", 1)}
    clock = SimpleNamespace(monotonic=lambda: now, sleep=lambda _: answer(set(), 1.0))

    def answer(_: Any, seconds: float) -> set[tuple[str, int]]:
        nonlocal now
        now += seconds
        return {("b", 1)} if now < notices else set()

    monkeypatch.setattr(restart, "time", clock)
    monkeypatch.setattr(restart, "unanswered", answer)
    monkeypatch.setattr(restart, "task_slots", lambda *_: 2 if now < notices else 1)
    monkeypatch.setattr(restart.on_spark, "is_local", lambda _: False)
    monkeypatch.setattr(restart.on_spark, "executor_addresses", lambda _: two)
    monkeypatch.setattr(restart.on_spark, "loses_executors_after", lambda _: 180.0)
    config = RunConfig(num_proc=2, max_restarts=1, min_num_proc=1, start_timeout=60)
    assert restart.tasks_again(SESSION, config, RANKS, SlotAllocation(2), ExecutorLostError("lost")) == ranks
    assert waited <= now < waited + 10


@pytest.mark.parametrize(("feeder_slots", "advice"), [(4, "feeders=1"), (3, "no feeders")])
def test_fewer_feeders_that_would_do_are_named(feeder_slots: int, advice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster(monkeypatch, ranks=4, feeders=feeder_slots)
    config = RunConfig(num_proc=3, feeders=3)
    with pytest.raises(NotEnoughSlotsError, match=f"Ask for fewer, {advice}, or start"):
        allocate_slots(SESSION, config, RunData(maps=MAPS), 3, RANKS)


def test_the_job_is_cancelled_and_the_directory_closed_where_the_wait_for_feeders_is_broken_off() -> None:
    def wait(seconds: float) -> None:
        raise KeyboardInterrupt

    done: list[str] = []
    directory = SimpleNamespace(end=lambda: done.append("end"), close=lambda: done.append("close"))
    job = SimpleNamespace(wait=wait, running=True, cancel=lambda: done.append("cancel"))
    broken: Any = SimpleNamespace(_directory=directory, _job=job)
    with pytest.raises(KeyboardInterrupt):
        Feeding.close(broken)
    assert done == ["end", "cancel", "close"]
