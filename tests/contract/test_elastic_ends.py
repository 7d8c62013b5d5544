"""How elastic runs begin and end: arguments, limits, exclusion, values, output, Ctrl-C; each with its opposite."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch

import spark_hvd.torch as hvd
from spark_hvd.runner import (
    RankFailedError,
    ResetLimitError,
    RunTimeoutError,
    StateLostError,
    TooFewRanksError,
    UnpicklableError,
    run_elastic_local,
    run_local,
)
from spark_hvd.runner.config import Reporting
from spark_hvd.runner.outcome.rows import FailureKind
from spark_hvd.testing import FaultPlan
from spark_hvd.world.errors import NotInitializedError
from tests.conftest import wait_until

pytestmark = pytest.mark.usefixtures("no_leaks")
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def count(
    faults: FaultPlan,
    steps: int = 6,
    pause: float = 0.0,
    prepare: Callable[[], None] = lambda: None,
    until: Path | None = None,
) -> Any:
    """Make steps, each with a collective and a commit; each rank returns the worlds in which it made them.

    The steps continue until the file `until` exists.
    """
    hvd.init()
    prepare()
    state: Any = hvd.elastic.ObjectState(step=0, worlds=[])

    @hvd.elastic.run
    def go(state: Any) -> None:
        while state.step < steps or (until is not None and not until.exists()):
            faults.at(state.step)
            time.sleep(pause)
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum) == hvd.size()
            state.step += 1
            state.worlds = [*state.worlds, (hvd.generation(), hvd.size())]
            state.commit()

    go(state)
    return state.worlds


def run(*args: Any, **options: Any) -> list[Any]:
    return run_elastic_local(count, args, **{"timeout": 60, "verbose": 0, **options})


# ---- limits ---------------------------------------------------------------------------------------------------------


def test_an_exception_on_all_ranks_ends_the_run() -> None:
    # In each generation: the first to raise may be so fast that the others lose it in the step before.
    plan = FaultPlan().raises(0, 3, None, error=KeyError).raises(1, 3, None, error=KeyError)
    with pytest.raises(RankFailedError, match="fn raised an exception on every rank") as caught:
        run(plan, host_failure_limit=10)
    assert isinstance(caught.value.__cause__, KeyError)
    assert {failed.rank for failed in caught.value.failures} == {0, 1}
    assert [size for _, size in run(FaultPlan().raises(0, 3, error=KeyError))[0]] == [2] * 6  # on one it does not


def test_state_that_no_rank_has_any_more_is_not_made_anew() -> None:
    with pytest.raises(StateLostError, match=r"all ranks that had the state are gone \(3 commits are lost\)"):
        run(FaultPlan().kill(0, 3).kill(1, 3), host_failure_limit=3)
    before = FaultPlan().kill(0, 0).kill(1, 0)  # there is none yet
    assert run(before, host_failure_limit=3)[0] == [(1, 2)] * 6


def test_reset_limit_counts_failures() -> None:
    plan = FaultPlan().kill(0, 2).kill(1, 4, generation=1)
    with pytest.raises(ResetLimitError, match="had to meet again 2 times after a failure, reset_limit=1; last: rank 1"):
        run(plan, reset_limit=1)
    assert run(plan, reset_limit=2)[0] == [(0, 2)] * 2 + [(1, 2)] * 2 + [(2, 2)] * 2


def test_a_host_on_which_ranks_keep_failing_gets_no_more(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """The other rank commits until the host is excluded, but the failing rank takes part in no commit."""
    plan = FaultPlan()
    for step in range(2, 2000):
        plan = plan.raises(1, step, generation=None)
    excluded = "host 127.0.0.1 gets no new ranks for the rest of the run: 2 of its ranks have failed without a commit"
    until = tmp_path / "excluded"

    def watch() -> None:
        wait_until(lambda: excluded in caplog.text, 50)
        until.touch()

    watcher = threading.Thread(target=watch)
    watcher.start()
    (worlds,) = run(plan, 5, 0.03, lambda: None, until, min_num_proc=1)
    watcher.join()
    assert worlds[:2] == [(0, 2)] * 2
    assert set(worlds[2:]) <= {(1, 1), (2, 1), (3, 1)}  # with a world of both in between, of one, or both in turn


def test_too_few_ranks_are_waited_for_as_long_as_elastic_timeout() -> None:
    plan = FaultPlan().kill(1, 3)
    with pytest.raises(TooFewRanksError, match=r"1 rank for elastic_timeout=1.5 s, min_num_proc=2: no more executors"):
        run(plan, host_failure_limit=1, cooldown_range=(30, 30), elastic_timeout=1.5)
    back = run(plan, host_failure_limit=1, cooldown_range=(0.5, 0.5), elastic_timeout=20)
    assert back[0] == [(0, 2)] * 3 + [(1, 2)] * 3
    alone = run(plan, host_failure_limit=1, min_num_proc=1)
    assert alone == [[(0, 2)] * 3 + [(1, 1)] * 3]


def test_the_same_plan_in_a_static_run_counts_restarts() -> None:
    plan = FaultPlan().kill(1, 3).kill(0, 5, generation=1)

    def fn() -> int:
        hvd.init()
        for step in range(6):
            plan.at(step)
            hvd.allreduce(torch.ones(1))
        return hvd.generation()

    assert run_local(fn, num_proc=2, max_restarts=2) == [2, 2]
    with pytest.raises(RankFailedError, match="SIGKILL"):
        run_local(fn, num_proc=2, max_restarts=1)


# ---- what fn does ---------------------------------------------------------------------------------------------------


def test_fn_that_never_calls_an_elastic_function() -> None:
    def fn() -> tuple[int, int, str]:
        hvd.init()
        try:
            hvd.allreduce(torch.ones(1))
        except NotInitializedError as error:
            return hvd.rank(), hvd.size(), str(error)
        raise AssertionError

    first, second = run_elastic_local(fn)
    assert (first[:2], second[:2]) == ((0, 2), (1, 2))
    assert "call collectives inside the function that is decorated with hvd.elastic.run" in first[2]


def test_an_exception_of_one_rank_if_fn_never_calls_an_elastic_function(tmp_path: Path) -> None:
    def fn() -> None:
        try:
            (tmp_path / "one").mkdir()
        except FileExistsError:
            raise ValueError("bad") from None

    with pytest.raises(
        RankFailedError, match="fn, which calls no elastic function, has returned on 1 rank of 2"
    ) as caught:
        run_elastic_local(fn, min_num_proc=1, timeout=60)
    assert str(caught.value.__cause__) == "bad"
    assert [failed.error for failed in caught.value.failures] == ["ValueError: bad"] * 2


@pytest.mark.parametrize("pause", [0.0, 0.7], ids=["after the others call it", "before"])
def test_fn_that_returns_on_one_rank_only(pause: float) -> None:
    def fn() -> int:
        if hvd.rank() == 1:
            time.sleep(0.7 - pause)
            return 1
        time.sleep(pause)
        return len(count(FaultPlan()))

    with pytest.raises(
        RankFailedError, match=r"\(number 1\) on host 127.0.0.1 returned from fn without having"
    ) as caught:
        run_elastic_local(fn, timeout=30)
    assert (caught.value.rank, caught.value.host, caught.value.first.kind) == (1, "127.0.0.1", FailureKind.RESULT)


def test_a_rank_that_fails_while_it_prepares_is_replaced(tmp_path: Path) -> None:
    def once() -> None:
        if hvd.rank() == 1 and not (tmp_path / "failed").exists():
            (tmp_path / "failed").touch()
            raise OSError("no data yet")

    assert run(FaultPlan(), 6, 0.0, once) == [[(0, 2)] * 6] * 2

    def ever() -> None:
        if hvd.rank() == 1:
            raise OSError("no data at all")

    with pytest.raises(RankFailedError, match="no data at all") as caught:
        run(FaultPlan(), 6, 0.0, ever)
    assert isinstance(caught.value.__cause__, OSError)


def test_values_are_those_of_the_last_generation_in_rank_order() -> None:
    def fn() -> tuple[int, int, int, int]:
        worlds = count(FaultPlan().kill(0, 3))
        return hvd.rank(), int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"]), len(worlds)

    assert run_elastic_local(fn, num_proc=3) == [(0, 0, 1, 6), (1, 1, 1, 6), (2, 2, 1, 6)]


def test_output_is_labelled_with_the_rank_of_the_time(capfd: pytest.CaptureFixture[str]) -> None:
    def fn() -> None:
        print(f"prepares as {hvd.rank()}", flush=True)
        count(FaultPlan().kill(0, 3))
        print(f"ends as {hvd.rank()}", flush=True)
        print("to stderr", file=sys.stderr, flush=True)

    out, err = io.StringIO(), io.StringIO()
    run_elastic_local(fn, reporting=Reporting(stdout=out, stderr=err))
    lines = out.getvalue().splitlines()
    assert sorted(lines) == sorted(
        ["[0] prepares as 0", "[1] prepares as 1", "[1] prepares as 1", "[0] ends as 0", "[1] ends as 1"]
    )
    assert "[0] to stderr" in err.getvalue().splitlines()
    assert "[1] to stderr" in err.getvalue().splitlines()
    run_elastic_local(fn, verbose=0)
    assert "[" not in "".join(capfd.readouterr())


# ---- the caller -----------------------------------------------------------------------------------------------------


def test_a_timeout_stops_all_ranks() -> None:
    with pytest.raises(RunTimeoutError, match=r"had not ended after timeout=3 s, with (0 failures|1 failure) survived"):
        run(FaultPlan().kill(1, 3), 10_000, 0.02, timeout=3)  # on a busy machine the failure has not happened by then


def test_ctrl_c_stops_all_ranks(tmp_path: Path) -> None:
    def prepare() -> None:
        (tmp_path / f"rank-{hvd.rank()}").touch()

    def interrupt() -> None:
        wait_until(lambda: len(list(tmp_path.iterdir())) == 2, 30)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGINT)

    # If tests run in the background, the shell makes them ignore it.
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            run(FaultPlan(), 10_000, 0.02, prepare)
    finally:
        thread.join()
        signal.signal(signal.SIGINT, former)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"backend": "mpi"}, ValueError, 'backend="mpi": MPI ends all ranks .* so it cannot be elastic'),
        ({"num_proc": 0}, ValueError, "num_proc=0"),
        ({"num_proc": 2, "min_num_proc": 3}, ValueError, "min_num_proc=3, num_proc=2, max_num_proc=None: expected"),
        ({"num_proc": 2, "max_num_proc": 1}, ValueError, "max_num_proc=1: expected"),
        (
            {"min_num_proc": 0},
            ValueError,
            "min_num_proc=0: expected .* at least 1, or None for num_proc",
        ),
        ({"max_num_proc": 0}, ValueError, "max_num_proc=0: expected a whole number of ranks, at least 1"),
        ({"min_num_proc": 1.5}, TypeError, "min_num_proc=1.5: expected a whole number"),
        (
            {"reset_limit": -1},
            ValueError,
            "reset_limit=-1: expected .* failures, at least 0, or None for any",
        ),
        ({"elastic_timeout": 0}, ValueError, "elastic_timeout=0: expected a number of seconds above 0"),
        ({"rejoin_timeout": -1}, ValueError, "rejoin_timeout=-1"),
        (
            {"host_failure_limit": 0},
            ValueError,
            "host_failure_limit=0: expected .* failures, at least 1",
        ),
        ({"cooldown_range": (5, 1)}, ValueError, r"cooldown_range=\(5, 1\): expected the minimum and the maximum"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_starts(
    options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        run_elastic_local(count, [FaultPlan()], **options)


def test_fn_that_cannot_be_pickled_is_refused() -> None:
    lock = threading.Lock()
    with pytest.raises(UnpicklableError, match="lock"):
        run_elastic_local(lambda: lock)
