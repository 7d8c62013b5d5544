"""The errors that callers get: why a call failed, and why a queue can run nothing more."""

from __future__ import annotations

import threading

from spark_hvd.world import errors
from spark_hvd.world.errors import CollectiveError

_VERDICT_SECONDS = 3.0
"""How long a network error waits for the coordinator to say which rank is gone."""


_ERRORS: dict[str, type[Exception]] = {
    "mismatch": errors.MismatchError,
    "horovod mismatch": errors.HorovodMismatchError,
    "stall": errors.StalledError,
}


def error_of(kind: str, text: str) -> Exception:
    """Return the error for calls that the coordinator fails; `kind` comes from its decision."""
    return _ERRORS[kind](text)


class QueueFailure:
    """Why one queue has failed; any thread may read it."""

    def __init__(self) -> None:
        self.text: str | None = None
        """The reason; None while the queue works."""
        self._known = threading.Event()

    def require_none(self) -> None:
        """Raise a CollectiveError if nothing can start any more."""
        if self.text is not None:
            raise CollectiveError(self.text)

    def announce(self) -> None:
        """Release the threads that wait for :attr:`text`."""
        self._known.set()

    def of(self, label: str) -> CollectiveError:
        """Return the error of a call that cannot succeed."""
        return CollectiveError(f"{label} failed: {self.text}")

    def explains(self, label: str, error: CollectiveError) -> CollectiveError:
        """Return the error of a call that failed on the wire, with the coordinator's reason, which may still arrive."""
        self._known.wait(_VERDICT_SECONDS)
        return CollectiveError(f"{label}: {error}") if self.text is None else self.of(label)

    def forked(self) -> None:
        """Reset the event in a forked process, in which no other thread can be waiting."""
        self._known = threading.Event()
