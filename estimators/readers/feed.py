"""The batches that a rank trains on, pass after pass, from wherever a checkpoint has left off."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator
from contextlib import closing

import torch

from spark_hvd.estimators.readers.position import Position, Shares, Taken
from spark_hvd.estimators.readers.reader import Batch, Reader


class Feed(Iterator[Batch]):
    """Endless batches of one rank.

    Going on where a pass was left, what was done is read again and thrown away. With another number of ranks, the rest
    of that pass is read as the former ranks would have read it, in parts (see
    :mod:`spark_hvd.estimators.readers.position`); from the next pass on all is as ever.

    Args:
        reader: Reads this rank's share.
        open_share: Opens a reader of the share of a rank among others, (rank, size).
        shares: How passes are shared; an attribute too.
        rank: This rank.
        size: Number of ranks.
        position: Where to begin.

    Attributes:
        given: Batches given so far, those skipped included.
    """

    def __init__(
        self,
        reader: Reader,
        open_share: Callable[[int, int], Reader],
        shares: Shares,
        rank: int,
        size: int,
        position: Position,
    ) -> None:
        self._reader, self._open_share, self.shares = reader, open_share, shares
        self._rank, self._size = rank, size
        self.given = 0
        self._batches: Generator[Batch, None, None] | None = None
        self._number = position.number
        self._taken, self._done = position.split(size)
        self._turn_over()

    @property
    def position(self) -> Position:
        """Where the next batch is."""
        mine = ((self._size, self._done),) if self._done else ()
        return Position(self._number, (*self._taken, *mine))

    def skip(self, batches: int) -> None:
        """Leave batches out."""
        if batches:
            self._drop()
        self.given += batches
        while batches:
            step = min(batches, self._left)
            batches -= step
            self._done += step
            self._turn_over()

    def __next__(self) -> Batch:
        """The next batch.

        Raises:
            DataError: as :meth:`Reader.batches`.
        """
        if self._batches is None:
            self._batches = self._stream(self._number, self._taken, self._rank, self._size)
            for _ in itertools.islice(self._batches, self._done):
                pass
        batch = next(self._batches)
        self._done += 1
        self.given += 1
        if not self._left:
            next(self._batches, None)  # let it end, and not be closed, so that readers keep what they can
            self._batches = None
        self._turn_over()
        return batch

    @property
    def _left(self) -> int:
        """Batches that each rank has left of the pass."""
        return len(self.shares.batches(self._taken, self._rank, self._size)) - self._done

    def _turn_over(self) -> None:
        """Begin the next pass, if this one is over."""
        if self._left <= 0:
            self._number, self._taken, self._done = self._number + 1, (), 0

    def _drop(self) -> None:
        if self._batches is not None:
            self._batches.close()
            self._batches = None

    def _stream(self, number: int, taken: Taken, rank: int, size: int) -> Generator[Batch, None, None]:
        """The batches of ``rank`` of ``size`` of what is left of a pass after ``taken``."""
        if not taken:
            mine = (rank, size) == (self._rank, self._size)
            reader = self._reader if mine else self._open_share(rank, size)
            try:
                yield from reader.batches(number)
            finally:
                if not mine:
                    reader.close()
            return
        yield from _cut(self._rows(number, taken, rank, size), self.shares.batches(taken, rank, size))

    def _rows(self, number: int, taken: Taken, rank: int, size: int) -> Iterator[Batch]:
        """The same rows, in batches as they come."""
        former, done = taken[-1]
        for part in self.shares.parts(taken, rank, size):
            with closing(self._stream(number, taken[:-1], part.rank, former)) as batches:
                at = 0
                for batch in itertools.islice(batches, done, None):
                    rows = len(next(iter(batch.values())))
                    low, high = max(part.start - at, 0), min(part.stop - at, rows)
                    if low < high:
                        yield {name: tensor[low:high] for name, tensor in batch.items()}
                    at += rows
                    if at >= part.stop:
                        break


def _cut(parts: Iterator[Batch], sizes: list[int]) -> Iterator[Batch]:
    """Batches of these sizes from parts of any; there are enough rows, and what is too much is left out."""
    held: list[Batch] = []
    for size in sizes:
        while (have := sum(len(next(iter(part.values()))) for part in held)) < size:
            held.append(next(parts))
        whole = {name: torch.cat([part[name] for part in held]) for name in held[0]}
        yield {name: tensor[:size] for name, tensor in whole.items()}
        held = [{name: tensor[size:] for name, tensor in whole.items()}] if have > size else []
