"""Threads with the interface of a Spark job: ended ones are reported, and hung ones are not waited for."""

from __future__ import annotations

import threading

import pytest

from spark_hvd.runner.launch.attend import ThreadJob
from tests.conftest import wait_until


def test_results_are_of_calls_that_have_ended_in_the_order_of_their_ends() -> None:
    may_end = [threading.Event() for _ in range(3)]

    def work(task: int) -> int:
        may_end[task].wait()
        return task

    job = ThreadJob(work, 3)
    try:
        for task in (2, 0):
            may_end[task].set()
            wait_until(lambda task=task: task in job.results())
        assert job.results() == [2, 0]
        assert job.running
    finally:
        may_end[1].set()


def test_the_error_raised_is_the_first_in_time() -> None:
    may_end = [threading.Event() for _ in range(2)]

    def work(task: int) -> None:
        may_end[task].wait()
        raise [RuntimeError("a consequence"), ValueError("the cause")][task]

    job = ThreadJob(work, 2)
    may_end[1].set()
    wait_until(lambda: has_failed(job))
    may_end[0].set()
    wait_until(lambda: not job.running)
    with pytest.raises(ValueError, match="the cause"):
        job.results()


def has_failed(job: ThreadJob[None]) -> bool:
    try:
        job.results()
    except ValueError:
        return True
    return False
