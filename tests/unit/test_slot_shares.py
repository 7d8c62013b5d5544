"""Runs of one program share its slots, and the terminal: which one waits for which, and in which order."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from spark_hvd.runner.launch.run import SlotShares
from spark_hvd.runner.stopping import stopped_by
from spark_hvd.runner.watch.display.lines import LineWriter
from spark_hvd.runner.watch.display.table import TableDisplay
from spark_hvd.runner.watch.view import RunView
from tests.conftest import wait_until


def later(shares: SlotShares, tasks: int, order: list[int]) -> threading.Thread:
    """A run in another thread; once it has its slots, its number of tasks is in ``order``."""

    def go() -> None:
        with shares.held(tasks, 4):
            order.append(tasks)

    before = len(shares._queue)
    thread = threading.Thread(target=go)
    thread.start()
    wait_until(lambda: len(shares._queue) > before or tasks in order)
    return thread


@contextmanager
def held_elsewhere(shares: SlotShares, tasks: int, slots: int | None) -> Iterator[None]:
    """Hold a run's slots in another thread."""
    holds, over = threading.Event(), threading.Event()

    def go() -> None:
        with shares.held(tasks, slots):
            holds.set()
            over.wait()

    thread = threading.Thread(target=go)
    thread.start()
    try:
        assert holds.wait(60)
        yield
    finally:
        over.set()
        thread.join()


def test_the_first_run_that_waits_says_so(caplog: pytest.LogCaptureFixture) -> None:
    shares, order = SlotShares(), list[int]()
    with held_elsewhere(shares, 3, 4):
        waiting = [later(shares, tasks, order) for tasks in (2, 1)]
        told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    for thread in waiting:
        thread.join()
    assert len(told) == 1
    assert "waits for 2 of the 4 slots, which other runs of this program hold" in told[0]


def test_runs_go_side_by_side_while_there_are_slots_for_all() -> None:
    shares = SlotShares()
    with held_elsewhere(shares, 2, 4), held_elsewhere(shares, 1, 4), held_elsewhere(shares, 1, 4):
        assert shares._free == 0
    # Exact thirds; and what cannot be counted.
    with held_elsewhere(shares, 1, 3), held_elsewhere(shares, 2, 3), held_elsewhere(shares, 5, None):
        assert shares._free == 0
    assert shares._free == 1


def test_a_large_run_is_not_passed_over() -> None:
    shares, order = SlotShares(), list[int]()
    with shares.held(3, 4):
        threads = [later(shares, 4, order), later(shares, 1, order)]  # there is room for the second one
        assert order == []
    for thread in threads:
        thread.join()
    assert order == [4, 1]


def test_a_run_that_is_told_to_stop_leaves_the_queue() -> None:
    shares, signal = SlotShares(), threading.Event()
    signal.set()
    with held_elsewhere(shares, 4, 4):
        with pytest.raises(KeyboardInterrupt), stopped_by(signal), shares.held(1, 4):
            pytest.fail("there is no room")
        assert shares._queue == []
    assert shares._free == 1


def test_a_run_within_another_does_not_wait_for_it() -> None:
    shares = SlotShares()
    with shares.held(4, 4):
        with shares.held(1, 4):
            assert shares._free == 0
        with held_elsewhere(shares, 5, None):
            assert shares._free == 0
    assert (shares._free, shares._threads) == (1, [])


def test_a_run_that_fails_gives_its_slots_back() -> None:
    shares = SlotShares()
    with suppress(ValueError), shares.held(4, 4):
        raise ValueError
    assert shares._free == 1


def test_one_table_is_drawn_at_a_time() -> None:
    terminals = [io.StringIO(), io.StringIO()]
    first, second = (TableDisplay(each, LineWriter(None, None), frozenset()) for each in terminals)
    for now in (0.0, 1.0):
        first.show(RunView("the first", 1, 0.0), now)
        second.show(RunView("the second", 1, 0.0), now)
    assert "the second" not in terminals[1].getvalue()
    first.end(None)
    assert "the first" in terminals[0].getvalue()
    second.show(RunView("the second", 1, 0.0), 2.0)
    second.end(None)
    assert "the second" in terminals[1].getvalue()
