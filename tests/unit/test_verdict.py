"""Causes and consequences, and what the caller gets."""

from __future__ import annotations

import builtins
import pickle
from typing import Any

import pytest

from spark_hvd.runner.outcome.collect import results
from spark_hvd.runner.outcome.endings import is_echo, is_echoing_abort, rank_failures
from spark_hvd.runner.outcome.errors import RankFailedError, RunTimeoutError
from spark_hvd.runner.outcome.rows import Failed, FailureKind, PickledOutcome
from spark_hvd.runner.watch.hang.verdict import HangVerdict, Kind

Group: Any = getattr(builtins, "ExceptionGroup", None)


def failed(rank: int, error: str = "ValueError: bad", **fields: object) -> Failed:
    return Failed(**{"rank": rank, "host": f"10.0.0.{rank}", "kind": FailureKind.EXCEPTION, "error": error, **fields})


@pytest.mark.parametrize(
    "text",
    [
        "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:20302",
        "[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 30000ms for recv operation to complete",
        "Gloo connectFullMesh failed with timed out connecting",
        "Connection reset by peer",
    ],
)
def test_what_backends_say_of_a_lost_peer_is_an_echo(text: str) -> None:
    assert is_echo(RuntimeError(text))


@pytest.mark.parametrize(
    "error",
    [ValueError("bad batch"), RuntimeError("shape '[2, 3]' is invalid"), OSError("Connection refused: db:5432")],
)
def test_an_error_of_the_users_own_is_no_echo(error: Exception) -> None:
    assert not is_echo(error)


def test_what_jax_says_of_a_lost_rank_is_an_echo() -> None:
    """As in JAX 0.10.2 on the CPU."""
    gloo = "Gloo all-reduce failed: [external/gloo/gloo/transport/tcp/pair.cc:538] Read error [127.0.0.1]:8901: "
    assert is_echo(ValueError(f"UNKNOWN: {gloo}Connection reset by peer"))
    assert not is_echo(ValueError("Connection refused: db:5432"))
    told = "F1126 client.h:80] Terminating process because the JAX distributed service detected fatal errors. This most"
    stack = "    @     0x7f3e8b6cb505  xla::CoordinationServiceAgent::SetError()\n" + "    @ (unknown)\n" * 18
    assert is_echoing_abort(-6, told)
    assert is_echoing_abort(-6, stack)
    assert not is_echoing_abort(-11, told)
    assert not is_echoing_abort(-6, "terminate called after throwing an instance of 'std::bad_cast'")


def test_an_error_raised_from_an_echo_is_an_echo() -> None:
    error = ValueError("step failed")
    error.__cause__ = RuntimeError("Connection closed by peer")
    assert is_echo(error)


def test_an_error_that_is_its_own_cause_is_looked_at_once() -> None:
    one, two = ValueError("one"), KeyError("two")
    one.__cause__, two.__cause__ = two, one
    assert not is_echo(one)
    two.__cause__ = two  # raise error from error
    assert not is_echo(two)


def test_an_error_that_cannot_say_what_it_is_is_no_echo() -> None:
    class Mute(RuntimeError):
        def __str__(self) -> str:
            raise RuntimeError("Connection closed by peer")

    assert not is_echo(Mute())


@pytest.mark.skipif(Group is None, reason="Python 3.10 has no groups")
def test_a_group_of_echoes_is_an_echo() -> None:
    gone = RuntimeError("Connection closed by peer")
    assert is_echo(Group("tasks", [gone, Group("more", [gone])]))
    assert not is_echo(Group("tasks", [gone, ValueError("bad batch")]))


def test_the_cause_comes_before_echoes_that_were_heard_earlier() -> None:
    echo, cause = failed(0, "RuntimeError: Connection closed by peer", echo=True), failed(1, kind=FailureKind.SIGNAL)
    stopped = failed(2, kind=FailureKind.STOPPED)
    assert rank_failures([stopped, echo, cause], order=[0, 1]) == [cause, echo, stopped]


def test_among_causes_the_hub_s_order_counts_and_not_the_clocks() -> None:
    late, early = failed(0, ended_at=10.0), failed(1, ended_at=99.0)
    assert rank_failures([late, early], order=[1, 0])[0] is early
    assert rank_failures([late, early])[0] is late


def test_results_raise_the_rank_s_own_exception_as_cause() -> None:
    own = pickle.dumps(KeyError("x"))
    packed = [PickledOutcome(0, True, pickle.dumps(5)), PickledOutcome.failed(failed(1, exception=own))]
    with pytest.raises(RankFailedError) as caught:
        results(packed, 2, [1], None)
    assert isinstance(caught.value.__cause__, KeyError)
    assert (caught.value.rank, caught.value.host) == (1, "10.0.0.1")


def test_results_in_rank_order() -> None:
    assert results([PickledOutcome(r, True, pickle.dumps(r * r)) for r in range(3)], 3, [], None) == [0, 1, 4]


@pytest.mark.parametrize("cls", [RankFailedError, RunTimeoutError])
def test_errors_pickle(cls: type[RankFailedError]) -> None:
    error = cls("text", (failed(3, log_tail="x"),), HangVerdict(Kind.HANG, "rank 1 sleeps", (1,)))
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.failures, again.hang) == (cls, "text", error.failures, error.hang)
