"""Runs of one program share its slots, and the terminal: who waits for whom, and in which order."""

from __future__ import annotations

import io
import threading
from contextlib import suppress

import pytest

from spark_hvd.runner.launch.turns import Turns
from spark_hvd.runner.stopping import stopped_by
from spark_hvd.runner.watch.display.lines import LineWriter
from spark_hvd.runner.watch.display.table import TableDisplay
from spark_hvd.runner.watch.view import RunView
from tests.conftest import wait_until


def later(turns: Turns, tasks: int, order: list[int]) -> threading.Thread:
    """A run in another thread; once it has its turn, its number of tasks is in ``order``."""

    def go() -> None:
        with turns.taking(tasks, 4):
            order.append(tasks)

    before = len(turns._line)
    thread = threading.Thread(target=go)
    thread.start()
    wait_until(lambda: len(turns._line) > before or tasks in order)
    return thread


def test_runs_have_their_turn_together_while_slots_do_for_all() -> None:
    turns = Turns()
    with turns.taking(2, 4), turns.taking(1, 4), turns.taking(1, 4):
        assert turns._free == 0
    with turns.taking(1, 3), turns.taking(2, 3), turns.taking(5, None):  # thirds, exactly; and what nobody can count
        assert turns._free == 0
    assert turns._free == 1


def test_a_large_run_is_not_passed_over() -> None:
    turns, order = Turns(), list[int]()
    with turns.taking(3, 4):
        threads = [later(turns, 4, order), later(turns, 1, order)]  # there is room for the second one
        assert order == []
    for thread in threads:
        thread.join()
    assert order == [4, 1]


def test_who_is_told_to_stop_leaves_the_line() -> None:
    turns, signal = Turns(), threading.Event()
    signal.set()
    with turns.taking(4, 4):
        with pytest.raises(KeyboardInterrupt), stopped_by(signal), turns.taking(1, 4):
            pytest.fail("there is no room")
        assert turns._line == []
    assert turns._free == 1


def test_a_run_that_fails_gives_its_slots_back() -> None:
    turns = Turns()
    with suppress(ValueError), turns.taking(4, 4):
        raise ValueError
    assert turns._free == 1


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
