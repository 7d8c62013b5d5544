"""Which part of MPI's process manager ended first, when the end of one brings down all others, without a clock."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Blame(IntEnum):
    """How likely an end is the cause of the others."""

    CAUSE = 0
    """Killed by a signal, which none of them sends another; or never started."""
    FAILED = 1
    """Left with an exit code other than 0, as a program also does whose connection to another has closed."""
    FOLLOWED = 2
    """Left in order, or was ended: something else has ended."""


_WAIT = {Blame.CAUSE: 0.5, Blame.FAILED: 1.2, Blame.FOLLOWED: 2.0}
"""Seconds until an end is told to the other ranks, so that a likelier one can be told first."""


@dataclass(slots=True)
class Suspect:
    """The likeliest cause that one supervisor knows of.

    Attributes:
        error: What has ended; None while nothing has.
        blame: How likely it is the cause.
        due: The moment at which it is to be told, on the caller's clock.
    """

    error: str | None = None
    blame: Blame = Blame.FOLLOWED
    due: float | None = None

    def accuse(self, error: str, blame: Blame, now: float) -> None:
        """Note an end, unless a likelier cause is known, or an equally likely one longer."""
        if self.error is None or blame < self.blame:
            self.error, self.blame, self.due = error, blame, now + _WAIT[blame]

    def told(self, now: float) -> bool:
        """Whether it is to be told now; True once."""
        if self.due is None or now < self.due:
            return False
        self.due = None
        return True
