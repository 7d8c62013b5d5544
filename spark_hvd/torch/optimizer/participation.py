"""Which ranks take part in a step of a gradient reducer; they learn it from what they exchange in the step anyway.

After the gradients of the first bucket come a few elements that are summed with them: how many ranks make the step,
whether one of them trains parameters without a fitting place, whether a rank that has called join() takes part, and how
many of those ranks Average does not count. All but the first are nearly always zero. Each element is a sum of ones. A
bucket may be sent in bf16, where 256 + 1 is 256, and NCCL's averages are not exact. So each element counts at most 32
ranks.
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
    """The rank trains parameters whose place is missing or no longer fits."""
    JOINED = 2
    """The rank has called join(), and Average counts it."""
    GONE = 3
    """The rank has called join(), and Average does not count it."""


@dataclass(frozen=True, slots=True)
class Participation:
    """The presence of all ranks.

    Attributes:
        anyone: Whether any rank makes the step.
        newcomers: Whether any rank trains parameters whose place is missing or no longer fits.
        joined: Whether any rank has joined.
        gone: How many ranks Average does not count.
    """

    anyone: bool = True
    newcomers: bool = False
    joined: bool = False
    gone: int = 0

    @classmethod
    def of(cls, presences: Sequence[int]) -> Participation:
        """Combine what each rank has reported."""
        return cls(
            any(presence < Presence.JOINED for presence in presences),
            Presence.HERE_WITH_NEWCOMERS in presences,
            any(presence >= Presence.JOINED for presence in presences),
            presences.count(Presence.GONE),
        )

    @classmethod
    def read(cls, notes: torch.Tensor) -> Participation:
        """Decode the sum of all ranks' notes."""
        here, newcomers, joined, *gone = notes.tolist()
        if here > 0.5 and not (newcomers or joined or any(gone)):
            return EVERYONE
        return cls(here > 0.5, newcomers > 0.5, joined > 0.5, sum(map(round, gone)))

    def correction(self, size: int) -> float:
        """Return the factor that turns the sum of the gradients over `size` into Average."""
        return size / (size - self.gone) if self.gone < size else 1.0


EVERYONE = Participation()
"""The participation of nearly every step."""


def notes_numel(size: int) -> int:
    """Return the number of elements in the notes of this many ranks."""
    return _SLOTS + -(-size // _EXACT)


def write(notes: torch.Tensor, presence: Presence, rank: int, one: float = 1.0) -> None:
    """Write one rank's notes; `one` is the value that arrives as 1."""
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
    """Compute :meth:`Participation.correction` on the device, so that the host need not wait for it."""
    gone = notes[_SLOTS:].float().round().sum()
    return torch.where(gone < size, size / (size - gone).clamp(min=1), 1.0)
