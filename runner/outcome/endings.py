"""How a rank ended, in words: pure functions of exit codes, reasons and stacks."""

from __future__ import annotations

import re
import signal

from spark_hvd.runner.outcome.rows import FailureKind

_HINTS = {
    "SIGKILL": " (often the kernel or the cluster manager: out of memory)",
    "SIGSEGV": " (a crash in native code)",
}
_OURS = re.compile(
    r'\s*File ".*/runner/(?:rank|supervise)/(?:\w+/)*\w+\.py"|\s*File "<frozen runpy>"|Extension modules:'
)


def exit_failure(exitcode: int) -> tuple[FailureKind, str]:
    """What an exit before fn returned was.

    Args:
        exitcode: As of subprocess: negative for a signal.
    """
    if exitcode >= 0:
        return FailureKind.EXIT, f"the process exited with code {exitcode} before fn returned"
    name = signal.Signals(-exitcode).name if -exitcode in set(signal.Signals) else str(-exitcode)
    return FailureKind.SIGNAL, f"the process was killed by {name}{_HINTS.get(name, '')}"


def stopped(reason: str, culprit: int | None) -> str:
    """Why we ended a rank.

    Args:
        reason: The hub's word for it.
        culprit: The rank that failed first, if one did.
    """
    return {
        "peer": f"stopped because rank {culprit} failed" if culprit is not None else "stopped: a rank failed",
        "interrupt": "stopped: the run was interrupted",
        "lost": "stopped because Spark lost another rank",
    }.get(reason, f"stopped: {reason}")


def start_took_too_long(start_timeout: float, mpi_seconds: float | None) -> str:
    """What to say of a rank that is not in the world in time.

    Args:
        start_timeout: The run's.
        mpi_seconds: How long MPI's process manager had, if it is what did not come up.
    """
    if mpi_seconds is None:
        return f"this rank had not joined the others after start_timeout={start_timeout:g} s"
    return (
        f"MPI's process manager did not start this rank within {mpi_seconds:g} s: perhaps this host cannot reach that "
        "of rank 0, on which it listens (see ports= and interfaces=)"
    )


def trim_stacks(text: str) -> str:
    """A fault handler's stacks without our own frames below fn, and without its list of extension modules."""
    return "\n".join(line for line in text.splitlines() if not _OURS.match(line)).strip()
