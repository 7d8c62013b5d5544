"""Finds out which part of MPI's process manager ended first, since the end of one ends all others. Has no clock."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Blame(IntEnum):
    """How likely the end of one part caused the end of the others; a lower value is likelier."""

    CAUSE = 0
    """A signal killed the part, and no part sends another a signal; or it never started."""
    FAILED = 1
    """The part exited with a code other than 0, which it also does after losing its connection to another."""
    FOLLOWED = 2
    """The part exited normally or was ended, because another part had ended."""


_WAIT = {Blame.CAUSE: 0.5, Blame.FAILED: 1.2, Blame.FOLLOWED: 2.0}
"""Seconds before the end of a part is reported to the other ranks, so that a likelier cause can come first."""


@dataclass(slots=True)
class Suspect:
    """The likeliest cause that one supervisor knows of.

    Attributes:
        error: The part that ended, and how; None until one has.
        blame: How likely this is the cause.
        due: When to report it, on the caller's clock; None if there is nothing to report.
    """

    error: str | None = None
    blame: Blame = Blame.FOLLOWED
    due: float | None = None

    def accuse(self, error: str, blame: Blame, now: float) -> None:
        """Note the end of a part, unless an earlier one is at least as likely the cause."""
        if self.error is None or blame < self.blame:
            self.error, self.blame, self.due = error, blame, now + _WAIT[blame]

    def is_due(self, now: float) -> bool:
        """Tell whether to report the cause now; True only once."""
        if self.due is None or now < self.due:
            return False
        self.due = None
        return True
