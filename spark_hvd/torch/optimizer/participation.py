"""Who takes part in a step of a gradient reducer: all ranks learn it from what they exchange in that step anyway.

Behind the gradients of the first bucket stand a few elements that are summed with them: how many ranks make the step,
and, zero nearly always, whether one of them trains parameters that have no fitting place, whether a rank stands in that
has called join(), and how many of those Average does not divide by. Sums of ones, as a bucket may travel in bf16, in
which 256 + 1 is 256, and where NCCL averages it is not quite ones that are added; so each 32 ranks count in an element
of their own.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_EXACT = 32
_SLOTS = 3


class Presence(enum.IntEnum):
    """How one rank takes part."""

    HERE = 0
    HERE_WITH_NEWCOMERS = 1
    """It trains parameters that have no place yet, or none that fits any more."""
    JOINED = 2
    """It has called join(), and Average divides by it."""
    GONE = 3
    """It has called join(), and Average does not divide by it."""


@dataclass(frozen=True, slots=True)
class Participation:
    """All ranks' presence.

    Attributes:
        anyone: Whether any rank makes the step.
        newcomers: Whether one of them trains parameters that have no place yet, or none that fits any more.
        joined: Whether any rank stands in.
        gone: How many ranks Average does not divide by.
    """

    anyone: bool = True
    newcomers: bool = False
    joined: bool = False
    gone: int = 0

    @classmethod
    def of(cls, presences: Sequence[int]) -> Participation:
        """Make it from what each rank has told."""
        return cls(
            any(presence < Presence.JOINED for presence in presences),
            Presence.HERE_WITH_NEWCOMERS in presences,
            any(presence >= Presence.JOINED for presence in presences),
            presences.count(Presence.GONE),
        )

    @classmethod
    def read(cls, notes: torch.Tensor) -> Participation:
        """Make it from the sum of all ranks' notes."""
        here, newcomers, joined, *gone = notes.tolist()
        if here > 0.5 and not (newcomers or joined or any(gone)):
            return EVERYONE
        return cls(here > 0.5, newcomers > 0.5, joined > 0.5, sum(map(round, gone)))

    def correction(self, size: int) -> float:
        """What the sum of the gradients over `size` is multiplied by, so that it becomes Average."""
        return size / (size - self.gone) if self.gone < size else 1.0


EVERYONE = Participation()
"""The participation of nearly every step."""


def notes_numel(size: int) -> int:
    """Elements of the notes among so many ranks."""
    return _SLOTS + -(-size // _EXACT)


def write(notes: torch.Tensor, presence: Presence, rank: int, one: float = 1.0) -> None:
    """Write the notes of one rank; `one` is what comes to 1 on its way."""
    notes.zero_()
    if presence < Presence.JOINED:
        notes[0] = one
    if presence is Presence.HERE_WITH_NEWCOMERS:
        notes[1] = one
    if presence >= Presence.JOINED:
        notes[2] = one
    if presence is Presence.GONE:
        notes[_SLOTS + rank // _EXACT] = one


def correction_on_device(notes: torch.Tensor, size: int) -> torch.Tensor:
    """As :meth:`Participation.correction`, without the host having to wait for the device."""
    gone = notes[_SLOTS:].float().round().sum()
    return torch.where(gone < size, size / (size - gone).clamp(min=1), 1.0)
