"""The driver's loop with a job of the test's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from spark_hvd.runner.launch.attend import Grace, attend
from spark_hvd.runner.spark.job import cancel_jobs


class InterruptedTwice:
    """A job that runs, as Spark's do, until it is cancelled. The first two waits for it are interrupted."""

    def __init__(self) -> None:
        self.running = True
        self._waits = 0

    def wait(self, timeout: float) -> None:
        self._waits += 1
        if self._waits <= 2:
            raise KeyboardInterrupt

    def cancel(self) -> None:
        self.running = False


def test_the_second_ctrl_c_cancels_the_job_too() -> None:
    job: Any = InterruptedTwice()
    hub: Any = SimpleNamespace(failure=None, stop=lambda reason: None, wait_gone=lambda timeout: True)
    monitor: Any = SimpleNamespace(ask=lambda hub: None, flush=lambda: None)
    with pytest.raises(KeyboardInterrupt):
        attend(job, hub, monitor, Grace(4.0, 1.0))
    assert not job.running


def test_a_request_to_cancel_that_fails_is_repeated() -> None:
    asked: list[str] = []

    def cancel(tag: str) -> None:
        asked.append(tag)
        if len(asked) == 1:
            raise ConnectionResetError("for a moment")

    session: Any = SimpleNamespace(sparkContext=SimpleNamespace(cancelJobsWithTag=cancel))
    cancel_jobs(session, "run", lambda seconds: len(asked) == 3)
    assert asked == ["run"] * 3
