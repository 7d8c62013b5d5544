"""The endless batches that a rank trains on, starting at the position of a checkpoint."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Generic

from spark_hvd.data.readers.forms import BatchT
from spark_hvd.data.readers.reader import Reader
from spark_hvd.data.readers.sharding import Position, Sharding


class Feed(Iterator[BatchT], Generic[BatchT]):
    """Endless batches of one rank.

    Attributes:
        given: Number of batches so far, including those that were skipped.
        rows: Number of rows in the last batch of this rank.
        weight: The factor for this rank's mean over the last batch, so that the mean of all ranks' results is the mean
            over all rows. It is 1 if all ranks have the same number of rows.
    """

    def __init__(self, reader: Reader[BatchT], sharding: Sharding, rank: int, size: int, position: Position) -> None:
        self._reader, self.sharding = reader, sharding
        self._rank, self._size = rank, size
        self.given, self.rows, self.weight = 0, 0, 1.0
        self._batches: Generator[BatchT, None, None] | None = None
        self._begin(position)

    @property
    def position(self) -> Position:
        """The position of the next batch."""
        return self.sharding.after(self._start, self._done, self._size) if self._done else self._start

    @property
    def left(self) -> int:
        """Number of batches that remain in this epoch."""
        return len(self._sizes) - self._done

    def skip(self, batches: int) -> None:
        """Skip ``batches`` batches without reading them."""
        self.given += batches
        while batches:
            step = min(batches, self.left)
            batches -= step
            self._done += step
            if self._done == len(self._sizes):
                self._begin(self.position)
            else:
                self._drop()

    def __next__(self) -> BatchT:
        """Return the next batch.

        Raises:
            DataError: As :meth:`Reader.batches`.
        """
        if self._batches is None:
            self._begin(self.position)
            share = self.sharding.share(self._start, self._rank, self._size)
            self._batches = self._reader.batches(self._start.epoch, share, self._sizes)
        batch = next(self._batches)
        self.rows = self._sizes[self._done]
        self.weight = self.rows * self._size / self._totals[self._done]
        self._done += 1
        self.given += 1
        if self._done == len(self._sizes):
            next(self._batches, None)  # let it end rather than close it, so that the reader keeps its cache
            self._begin(self.position)
        return batch

    def _begin(self, position: Position) -> None:
        """Share the rows after ``position``. If they are fewer than the ranks, start the next epoch."""
        self._drop()
        if not self.sharding.batches(position, self._rank, self._size):
            position = Position(position.epoch + 1)
        self._start, self._done = position, 0
        self._sizes = self.sharding.batches(position, self._rank, self._size)
        self._totals = self.sharding.totals(position, self._size)

    def _drop(self) -> None:
        batches, self._batches = self._batches, None
        if batches is not None:
            batches.close()
