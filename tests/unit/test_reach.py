"""Hosts that do not answer while their ranks are missing."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from spark_hvd.runner.config import RunConfig
from spark_hvd.runner.launch.attempt import _look as look_at
from spark_hvd.runner.outcome.errors import ClusterError, ExecutorLostError, SetupError
from spark_hvd.runner.spark import reach as looks
from spark_hvd.runner.spark.errors import heap_full, translate
from spark_hvd.runner.spark.reach import Placement, Reach, unanswered

TASKS = {0: ("2", "10.0.0.2"), 1: ("1", "10.0.0.1"), 2: ("2", "10.0.0.2")}


@pytest.fixture(autouse=True)
def _short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looks, "_ANSWER", 0.5)


@pytest.fixture
def answering() -> Iterator[tuple[str, int]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()


@pytest.fixture
def silent() -> Iterator[tuple[str, int]]:
    """A port that swallows requests, like a host that is gone: its queue is full."""
    with ExitStack() as closing:
        listener = closing.enter_context(socket.create_server(("127.0.0.2", 0), backlog=0))
        for _ in range(4):
            filler = closing.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        yield listener.getsockname()


def test_a_refusal_is_an_answer(answering: tuple[str, int], silent: tuple[str, int]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        refusing = closed.getsockname()
    assert unanswered([answering, refusing, silent], 0.3) == {silent}


def test_ranks_are_numbered_as_the_tasks_number_themselves() -> None:
    assert Placement(TASKS, {}).hosts(3) == {0: "10.0.0.2", 1: "10.0.0.2", 2: "10.0.0.1"}
    assert Placement(TASKS, {}).on_executor("2", 3) == "rank 0 on 10.0.0.2, rank 1 on 10.0.0.2"
    assert Placement(TASKS, {}).on_executor("1", 3) == "rank 2 on 10.0.0.1"


def test_several_ranks_of_a_task_are_where_it_is() -> None:
    there = Placement(TASKS, {}, num_tasks=3)
    assert there.hosts(6) == dict(enumerate(["10.0.0.2"] * 4 + ["10.0.0.1"] * 2))
    assert there.on_executor("1", 6) == "rank 4 on 10.0.0.1, rank 5 on 10.0.0.1"
    assert Placement(TASKS, {}, num_tasks=4).hosts(8) == {}


def test_nothing_is_named_before_all_tasks_are_placed() -> None:
    assert Placement(TASKS, {}).hosts(4) == {}
    assert Placement(TASKS, {}).on_executor("1", 4) is None


def test_a_host_that_answers_the_second_time_is_not_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = ("127.0.0.1", 1), ("127.0.0.2", 1)
    answers = [{other}, set(), {other}, {other}]
    monkeypatch.setattr(looks, "unanswered", lambda targets, timeout: answers.pop(0))
    there = Placement({0: ("1", "127.0.0.1"), 1: ("2", "127.0.0.2")}, {"1": one, "2": other})
    reach = Reach(2, lambda: there, _look_at=0.0)
    assert reach.missing({0}) is None
    reach._look_at = 0.0
    assert (reach.missing({0}) or "").startswith("rank 1 on 127.0.0.2 ")


def test_missing_ranks_on_hosts_that_do_not_answer_are_named(
    answering: tuple[str, int], silent: tuple[str, int]
) -> None:
    there = Placement({0: ("1", "127.0.0.1"), 1: ("2", "127.0.0.2")}, {"1": answering, "2": silent})
    reach = Reach(2, lambda: there, _look_at=0.0)
    assert (reach.missing({0}) or "").startswith("rank 1 on 127.0.0.2 (Spark has started the task, but")
    assert reach.missing({0}) is None, "asks every ten seconds only"
    assert Reach(2, lambda: there, _look_at=0.0).missing({0, 1}) is None


def test_a_host_that_does_not_answer_ends_a_run_without_a_hub(
    answering: tuple[str, int], silent: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looks, "_FIRST_LOOK", 0.0)
    there = Placement({0: ("1", "127.0.0.1"), 1: ("2", "127.0.0.2")}, {"1": answering, "2": silent})
    job: Any = SimpleNamespace(computing=False, placed=True, placement=lambda: there)
    with pytest.raises(ExecutorLostError, match=r"rank 1 on 127\.0\.0\.2"):
        look_at(job, None, 2, RunConfig(num_proc=2), local=False)()


def test_nothing_is_concluded_where_no_host_answers(silent: tuple[str, int]) -> None:
    there = Placement({0: ("1", "127.0.0.2")}, {"1": silent})
    assert Reach(1, lambda: there, _look_at=0.0).missing(set()) is None


def test_slow_ranks_on_hosts_that_answer_are_waited_for(answering: tuple[str, int]) -> None:
    there = Placement({0: ("1", "127.0.0.1")}, {"1": answering})
    reach = Reach(1, lambda: there, _look_at=0.0)
    assert reach.missing(set()) is None
    assert reach.absent(set()) == "Not heard from: rank 0 on 127.0.0.1. "


def test_where_spark_does_not_tell_nothing_is_said() -> None:
    reach = Reach(1, lambda: None, _look_at=0.0)
    assert reach.missing(set()) is None
    assert reach.absent(set()) == ""


def test_sparks_error_gets_ranks_and_hosts() -> None:
    error = translate(Exception("ExecutorLostFailure (executor 2 exited unrelated"), 3, Placement(TASKS, {}))
    assert isinstance(error, ExecutorLostError)
    assert "the executor of rank 0 on 10.0.0.2, rank 1 on 10.0.0.2 while 3 ranks" in str(error)


def test_a_full_heap_is_told_with_what_goes_through_it() -> None:
    said = "An error occurred while calling o16.broadcast.\n: java.lang.OutOfMemoryError: Java heap space"
    error = heap_full(Exception(said))
    assert isinstance(error, ClusterError)
    assert "java.lang.OutOfMemoryError: Java heap space. fn and its arguments pass through it" in str(error)
    assert "spark.driver.memory" in str(error)
    assert heap_full(Exception("An error occurred while calling o16.broadcast.\n: java.io.IOException")) is None
    on_executor = translate(Exception(f"ExecutorLostFailure (executor 2 exited: {said}"), 3, Placement(TASKS, {}))
    assert isinstance(on_executor, ExecutorLostError)


def test_a_silent_host_is_named_by_the_error_and_not_by_a_line_of_code() -> None:
    raised = '    raise LostError(f"SPARK_HVD_LOST: lost {lost}; all other ranks were stopped:END")'
    said = "LostError: SPARK_HVD_LOST: lost rank 1 on 10.0.0.2; all other ranks were stopped:END"
    error = translate(Exception(f"Traceback (most recent call last):\n{raised}\n{said}\n\tat org.apache"), 2)
    assert str(error).startswith("lost rank 1 on 10.0.0.2; all other ranks were stopped. The host may be down")


def test_what_pyspark_itself_misses_on_an_executor_is_named() -> None:
    error = translate(Exception("Job aborted\n...\nModuleNotFoundError: No module named 'pyarrow'\n\tat org.apache"), 2)
    assert isinstance(error, SetupError)
    assert str(error).startswith(
        "ModuleNotFoundError: No module named 'pyarrow', in the Python of an executor. Install"
    )


@pytest.mark.parametrize(
    "said",
    [
        "[PYTHON_VERSION_MISMATCH] Python in worker has different version: 3.10 than that in driver: 3.11",
        'java.io.IOException: Cannot run program "/opt/py": error=2, No such file or directory',
    ],
)
def test_another_python_on_an_executor_is_named_with_its_host(said: str) -> None:
    error = translate(Exception(f"Job aborted\nLost task 0.3 (TID 3) (10.0.0.2 executor 1): {said}\n at x"), 2)
    assert isinstance(error, SetupError)
    assert str(error).startswith(f"Lost task 0.3 (TID 3) (10.0.0.2 executor 1): {said}. The driver and all executors")
    assert "PYSPARK_PYTHON" in str(error)


def test_the_stacks_of_the_jvm_do_not_hide_what_python_raised() -> None:
    frames = "\n".join(f"\tat org.apache.spark.Thing$.run(Thing.scala:{line})" for line in range(99))
    raised = "PythonException: Traceback (most recent call last):\n  File x\nRefusedError: rank 1 does not start"
    error = translate(Exception(f"An error occurred\n{frames}\n\t... 12 more\nCaused by: {raised}\n{frames}"), 2)
    assert str(error) == f"the Spark job of this run failed: An error occurred\nCaused by: {raised}"
