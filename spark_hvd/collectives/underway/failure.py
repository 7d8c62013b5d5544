"""What callers are told: why a call fails, and why a queue can run nothing any more, once that is so."""

from __future__ import annotations

import threading

from spark_hvd.world import errors
from spark_hvd.world.errors import CollectiveError

_VERDICT_SECONDS = 3.0
"""How long an error of the network waits for the coordinator's word on which rank has gone."""


_ERRORS: dict[str, type[Exception]] = {
    "mismatch": errors.MismatchError,
    "horovod mismatch": errors.HorovodMismatchError,
    "stall": errors.StalledError,
}


def error_of(kind: str, text: str) -> Exception:
    """The error of calls that the coordinator has fail; `kind` is as in its decision."""
    return _ERRORS[kind](text)


class QueueFailure:
    """Of one queue; read by any thread."""

    def __init__(self) -> None:
        self.text: str | None = None
        """Why; None as long as all is well."""
        self._known = threading.Event()

    def require_none(self) -> None:
        """Raise a CollectiveError if nothing can start any more."""
        if self.text is not None:
            raise CollectiveError(self.text)

    def announce(self) -> None:
        """Let go whoever waits for :attr:`text`."""
        self._known.set()

    def of(self, label: str) -> CollectiveError:
        """The error of a call that cannot end well."""
        return CollectiveError(f"{label} failed: {self.text}")

    def explains(self, label: str, error: CollectiveError) -> CollectiveError:
        """The error of a call that failed on the wire: with the coordinator's word, which may be on its way."""
        self._known.wait(_VERDICT_SECONDS)
        return CollectiveError(f"{label}: {error}") if self.text is None else self.of(label)

    def forked(self) -> None:
        """This process was forked: no other thread can be waiting here."""
        self._known = threading.Event()
