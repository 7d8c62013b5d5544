"""How often to poll MPI for the end of an operation: without pause while bytes move, with growing pauses otherwise."""

from __future__ import annotations

_MOVED_SECONDS = 4e-6
"""A call that finds nothing to do takes a tenth of this; a longer one has copied something."""
_SPIN_SECONDS = 3e-4
"""How long to poll without pause; with less, a sleep would slow down small collectives."""
_FIRST_PAUSE = 2e-5
_LAST_PAUSE = 1e-3
_GROWTH = 1.05
"""Growth of the pauses, from the first to the last in about 20 ms: a peer that late is usually much later."""


class PollingBackoff:
    """Decides how long a polling thread pauses between two polls.

    For ``patience`` seconds without progress it polls without a pause.
    """

    def __init__(self, patience: float = _SPIN_SECONDS) -> None:
        self._patience = patience
        self._moved: float | None = None
        self._pause = _FIRST_PAUSE

    def after(self, before: float, now: float) -> float:
        """Return the seconds to sleep before the next call, 0 for none.

        The last call began at ``before`` and ended at ``now``, in seconds on any clock.
        """
        if self._moved is None or now - before > _MOVED_SECONDS:
            self._moved, self._pause = (before if self._moved is None else now), _FIRST_PAUSE
            if now - before > _MOVED_SECONDS:
                return 0.0
        if now - self._moved < self._patience:
            return 0.0
        pause = self._pause
        self._pause = min(pause * _GROWTH, _LAST_PAUSE)
        return pause
