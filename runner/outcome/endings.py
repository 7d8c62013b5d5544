"""Describes how a rank ended: pure functions of exit codes, reasons and stacks."""

from __future__ import annotations

import builtins
import re
import signal
from collections.abc import Sequence
from typing import Any

from spark_hvd.runner.outcome.rows import Failed, FailureKind
from spark_hvd.world.words import text_of

GROUPS: Any = getattr(builtins, "BaseExceptionGroup", ())  # Python 3.10 has none
_HINTS = {
    "SIGKILL": " (often the kernel or the cluster manager: out of memory)",
    "SIGSEGV": " (a crash in native code)",
}
_OURS = re.compile(
    r'\s*File ".*/runner/(?:rank|supervise)/(?:\w+/)*\w+\.py"|\s*File "<frozen runpy>"|Extension modules:'
)


def exit_failure(exitcode: int) -> tuple[FailureKind, str]:
    """Describe an exit before fn returned. As in subprocess, a negative exit code means a signal."""
    if exitcode >= 0:
        return FailureKind.EXIT, f"the process exited with code {exitcode} before fn returned"
    name = signal.Signals(-exitcode).name if -exitcode in set(signal.Signals) else str(-exitcode)
    return FailureKind.SIGNAL, f"the process was killed by {name}{_HINTS.get(name, '')}"


def stopped(reason: str, culprit: int | None) -> str:
    """Say why we stopped a rank."""
    return {
        "peer": f"stopped because rank {culprit} failed" if culprit is not None else "stopped: a rank failed",
        "interrupt": "stopped: the run was interrupted",
        "lost": "stopped because Spark lost another rank",
    }.get(reason, f"stopped: {reason}")


def start_took_too_long(start_timeout: float, mpi_seconds: float | None) -> str:
    """Describe a rank that did not join the world in time.

    ``mpi_seconds`` is the time limit of MPI's process manager, if that is what did not start; otherwise None.
    """
    if mpi_seconds is None:
        return f"this rank had not joined the others after start_timeout={start_timeout:g} s"
    return (
        f"MPI's process manager did not start this rank within {mpi_seconds:g} s: perhaps this host cannot reach rank "
        "0's host, on which the manager listens (see ports= and interfaces=)"
    )


def trim_stacks(text: str) -> str:
    """Remove our own frames below fn, and the list of extension modules, from a fault handler's stacks."""
    return "\n".join(line for line in text.splitlines() if not _OURS.match(line)).strip()


# Messages of torch.distributed and its backends about a lost peer: plain RuntimeErrors, known by their text only.
_PEER_LOST = re.compile(
    r"connection (was )?(closed|reset|refused)( by peer)?|broken pipe|socket (is |was )?closed"
    r"|timed out waiting \d+ ?ms for (recv|send)|remote process exited|nccl.*(aborted|remote error)"
    r"|failed to (recv|send), got \d+ bytes|connectfullmesh",
    re.IGNORECASE,
)
_JAX_ABORTS = re.compile("because the JAX distributed service detected fatal errors|CoordinationServiceAgent::SetError")
"""What JAX prints before it aborts a process whose coordinator, in rank 0, is gone."""


def is_echo(error: BaseException) -> bool:
    """Tell whether an exception, its cause, or each exception of a group only reports the loss of a peer or network."""
    return _is_echo(error, set())


def _is_echo(error: BaseException | None, seen: set[int]) -> bool:
    if error is None or id(error) in seen:  # `raise error from error` is a cycle
        return False
    seen.add(id(error))
    names = {cls.__name__ for cls in type(error).__mro__}
    if names & {"CollectiveError", "DistNetworkError", "DistBackendError"}:
        return True
    text = text_of(error)
    if _PEER_LOST.search(text) and (isinstance(error, RuntimeError) or "Gloo" in text):  # JAX raises it as a ValueError
        return True
    if isinstance(error, GROUPS):
        return all(_is_echo(each, {*seen}) for each in error.exceptions)
    return _is_echo(error.__cause__, seen)


def is_echoing_abort(exitcode: int, output: str) -> bool:
    """Tell whether JAX aborted a process because another one was lost."""
    return exitcode == -signal.SIGABRT and _JAX_ABORTS.search(output) is not None


def rank_failures(failures: Sequence[Failed], order: Sequence[int] = ()) -> list[Failed]:
    """Sort failures, the first cause first.

    ``order`` has the ranks in the order in which the hub heard of their failures, because the hosts' clocks differ.
    """
    heard = {rank: position for position, rank in enumerate(order)}

    def key(failure: Failed) -> tuple[bool, bool, int, float, int]:
        not_its_own = failure.kind in (FailureKind.STOPPED, FailureKind.LOST, FailureKind.TIMEOUT)
        return not_its_own, failure.echo, heard.get(failure.rank, len(heard)), failure.ended_at, failure.rank

    return sorted(failures, key=key)
