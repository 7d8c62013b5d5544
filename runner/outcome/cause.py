"""Which failure is the cause, and which are echoes of it."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

from spark_hvd.runner.outcome.rows import Failed, FailureKind

# What torch.distributed and its backends say when the other side has gone. They say it as plain RuntimeErrors.
_GONE = re.compile(
    r"connection (was )?(closed|reset|refused)( by peer)?|broken pipe|socket (is |was )?closed"
    r"|timed out waiting \d+ ?ms for (recv|send)|remote process exited|nccl.*(aborted|remote error)"
    r"|failed to (recv|send), got \d+ bytes|connectfullmesh",
    re.IGNORECASE,
)
_JAX_ABORTS = re.compile("because the JAX distributed service detected fatal errors|CoordinationServiceAgent::SetError")
"""What JAX prints when it aborts a process whose coordinator, in rank 0, has gone: first why, then where."""


def is_echo(error: BaseException) -> bool:
    """Whether an exception, or one it was raised from, only says that a peer or the network has gone."""
    seen: BaseException | None = error
    while seen is not None:
        names = {cls.__name__ for cls in type(seen).__mro__}
        if names & {"CollectiveError", "DistNetworkError", "DistBackendError"}:
            return True
        text = str(seen)
        if _GONE.search(text) and (isinstance(seen, RuntimeError) or "Gloo" in text):  # JAX has it as a ValueError
            return True
        seen = seen.__cause__
    return False


def is_echoing_abort(exitcode: int, output: str) -> bool:
    """Whether a process was aborted by JAX for the loss of another one.

    Args:
        exitcode: As of subprocess: negative for a signal.
        output: The last that it has printed.
    """
    return exitcode == -signal.SIGABRT and _JAX_ABORTS.search(output) is not None


def rank_failures(failures: Sequence[Failed], order: Sequence[int] = ()) -> list[Failed]:
    """Sort failures, the first cause first.

    Args:
        failures: At least one.
        order: Ranks in the order in which the hub heard of their failures; the clocks of hosts differ.
    """
    heard = {rank: position for position, rank in enumerate(order)}

    def key(failure: Failed) -> tuple[bool, bool, int, float, int]:
        stopped = failure.kind in (FailureKind.STOPPED, FailureKind.LOST, FailureKind.TIMEOUT)
        return stopped, failure.echo, heard.get(failure.rank, len(heard)), failure.ended_at, failure.rank

    return sorted(failures, key=key)
