"""Where a training stands in its data, and how the rest of a pass is shared among another number of ranks.

Pure functions of counts. N ranks that have each taken k batches of a pass leave the rest of N shares. M ranks that go
on lay these rests end to end, in the order of the N ranks, and cut that into M pieces. If they are cut off too, the
next do the same with what they have left. So each row of the pass comes once, whatever becomes of the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from spark_hvd.estimators.readers.sharding import batch_rows, share_of

Taken = tuple[tuple[int, int], ...]
"""What was taken of a pass: (ranks, batches of each), the earliest first."""


@dataclass(frozen=True)
class Position:
    """A place in the data: the number of the pass, from 0, and what was taken of it."""

    number: int = 0
    taken: Taken = ()

    def to_json(self) -> list[Any]:
        """As JSON-ready lists of numbers."""
        return [self.number, [list(each) for each in self.taken]]

    @classmethod
    def from_json(cls, data: Sequence[Any]) -> Position:
        """The inverse of :meth:`to_json`."""
        number, taken = data
        return cls(number, tuple((size, batches) for size, batches in taken))

    def split(self, size: int) -> tuple[Taken, int]:
        """What was taken before ``size`` ranks share the pass, and the batches that each of them has taken since."""
        if self.taken and self.taken[-1][0] == size:
            return self.taken[:-1], self.taken[-1][1]
        return self.taken, 0


@dataclass(frozen=True)
class Part:
    """Rows ``start`` to ``stop`` (exclusive) of what ``rank`` has left of its share."""

    rank: int
    start: int
    stop: int


@dataclass(frozen=True)
class Shares:
    """How a pass over the rows of a data set is shared among ranks."""

    rows: int
    batch_size: int
    drop_last: bool = False

    def batches(self, taken: Taken, rank: int, size: int) -> list[int]:
        """Rows in each batch of ``rank`` of ``size``, of what is left after ``taken``.

        None of them where fewer rows than ranks are left: these are left out.
        """
        rows = self.left(taken)
        return batch_rows(rows, rank, size, self.batch_size, self.drop_last) if rows >= size else []

    def left(self, taken: Taken) -> int:
        """Rows that are left after ``taken``."""
        if not taken:
            return self.rows
        return sum(self._left_by(taken))

    def parts(self, taken: Taken, rank: int, size: int) -> list[Part]:
        """Where the rows of ``rank`` of ``size`` are, among what each rank of the last of ``taken`` has left."""
        return [Part(*each) for each in share_of(self._left_by(taken), rank, size)]

    def _left_by(self, taken: Taken) -> list[int]:
        """Rows that each rank of the last of ``taken`` has left."""
        size, batches = taken[-1]
        return [sum(self.batches(taken[:-1], rank, size)[batches:]) for rank in range(size)]
