"""After which failures a static run is restarted, how often, and what it reports."""

from __future__ import annotations

import logging
import pickle

import pytest

from spark_hvd.runner.config import RunConfig
from spark_hvd.runner.launch.restart import check_least, reason_to_restart, with_restarts
from spark_hvd.runner.outcome.errors import (
    ClusterError,
    ExecutorLostError,
    NotEnoughSlotsError,
    RankFailedError,
    RunError,
    RunTimeoutError,
    StartTimeoutError,
)
from spark_hvd.runner.outcome.rows import Failed, FailureKind
from spark_hvd.runner.spark.session import listening


def failed(kind: FailureKind) -> RankFailedError:
    first = Failed(1, "10.0.0.7", kind, "the process was killed by SIGKILL")
    return RankFailedError("rank 1 failed", (first, Failed(0, "10.0.0.6", FailureKind.STOPPED, "stopped")))


class Starts:
    """Raises one error after the other, then returns."""

    def __init__(self, *errors: BaseException) -> None:
        self.errors = list(errors)
        self.calls: list[tuple[int, RunError | None]] = []

    def __call__(self, generation: int, loss: RunError | None) -> str:
        self.calls.append((generation, loss))
        if self.errors:
            raise self.errors.pop(0)
        return "done"


def test_a_lost_executor_and_a_killed_rank_are_reasons() -> None:
    assert reason_to_restart(ExecutorLostError("Spark lost rank 1.\nMore.")) == "Spark lost rank 1."
    assert reason_to_restart(failed(FailureKind.SIGNAL)) == (
        "rank 1 on host 10.0.0.7: the process was killed by SIGKILL"
    )
    assert reason_to_restart(failed(FailureKind.LOST)) is not None


@pytest.mark.parametrize(
    "error",
    [failed(kind) for kind in FailureKind if kind not in (FailureKind.SIGNAL, FailureKind.LOST)]
    + [
        RunTimeoutError("x", ()),
        StartTimeoutError("x"),
        ClusterError("x"),
        NotEnoughSlotsError("x"),
        RunError("x"),
        KeyboardInterrupt(),
        ValueError("x"),
    ],
    ids=lambda error: f"{type(error).__name__}-{getattr(getattr(error, 'failures', None) or '', '__len__', int)()}",
)
def test_nothing_else_is(error: BaseException) -> None:
    starts = Starts(error)
    with pytest.raises(type(error)) as caught:
        with_restarts(starts, 5)
    assert len(starts.calls) == 1
    assert "restart" not in str(caught.value)


def test_each_restart_is_logged_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    lost, killed = ExecutorLostError("Spark lost rank 0."), failed(FailureKind.SIGNAL)
    starts = Starts(lost, killed)
    with caplog.at_level(logging.WARNING):
        assert with_restarts(starts, 3) == "done"
    assert starts.calls == [(0, None), (1, lost), (2, killed)]
    assert [record.message for record in caplog.records] == [
        "restart 1 of 3: Spark lost rank 0.",
        "restart 2 of 3: rank 1 on host 10.0.0.7: the process was killed by SIGKILL",
    ]


def test_none_unless_asked_for() -> None:
    starts = Starts(ExecutorLostError("lost"))
    with pytest.raises(ExecutorLostError, match=r"^lost\nfn does not run again unless you give max_restarts="):
        with_restarts(starts, 0)
    assert len(starts.calls) == 1


def test_the_last_error_says_how_many_were_made() -> None:
    starts = Starts(*[ExecutorLostError("lost") for _ in range(3)])
    with pytest.raises(ExecutorLostError, match=r"lost\nThis was after 2 restarts \(max_restarts=2\)"):
        with_restarts(starts, 2)
    starts = Starts(ExecutorLostError("lost"), failed(FailureKind.EXCEPTION))
    with pytest.raises(RankFailedError, match=r"rank 1 failed\nThis was after 1 restart \(max_restarts=2\)") as caught:
        with_restarts(starts, 2)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), copy.failures) == (str(caught.value), caught.value.failures)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_restarts": -1}, "max_restarts=-1: expected a whole number, at least 0"),
        ({"max_restarts": 1.0}, r"max_restarts=1\.0: expected a whole number"),
        ({"min_num_proc": 1}, "min_num_proc=1 with max_restarts=0: .* give max_restarts too"),
        ({"min_num_proc": 5, "max_restarts": 1}, "min_num_proc=5 with num_proc=4, .* from 1 to num_proc"),
        ({"min_num_proc": 0, "max_restarts": 1}, "min_num_proc=0"),
        ({"min_num_proc": 3, "max_restarts": 1, "procs_per_task": 2}, "expected a multiple of procs_per_task"),
        ({"min_num_proc": "2", "max_restarts": 1}, "min_num_proc='2': expected a whole number"),
    ],
)
def test_arguments(arguments: dict[str, object], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        RunConfig(num_proc=4, **arguments)  # type: ignore[arg-type]


def test_an_executor_that_is_starting_has_no_port_yet() -> None:
    executors = {"0": "10.0.0.7:40001", "1": "10.0.0.8", "2": "[fd00::1]:40002", "3": "[fd00::2]"}
    assert listening(executors) == {"0": ("10.0.0.7", 40001), "2": ("fd00::1", 40002)}


def test_a_least_number_above_the_clusters() -> None:
    check_least(RunConfig(min_num_proc=4, max_restarts=1, procs_per_task=2), 2)
    with pytest.raises(ValueError, match="min_num_proc=4: expected at most 2, the ranks this run starts with"):
        check_least(RunConfig(min_num_proc=4, max_restarts=1), 2)
