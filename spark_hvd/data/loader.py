"""Loaders, which iterate over the batches of a shard, an epoch at a time; also as a data set for PyTorch."""

from __future__ import annotations

import itertools
import mmap
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from torch.utils.data import IterableDataset, get_worker_info

from spark_hvd.context import basics
from spark_hvd.context.global_state import is_initialized
from spark_hvd.data.readers.errors import DataError
from spark_hvd.data.readers.feed import Feed
from spark_hvd.data.readers.forms import Form
from spark_hvd.data.readers.reader import Reader
from spark_hvd.data.readers.sharding import Position, Sharding
from spark_hvd.data.source import DataSource, ReadOptions
from spark_hvd.world.words import count

T_co = TypeVar("T_co", covariant=True)

VERSION = 2
"""Version of the format that :meth:`ShardLoader.state_dict` returns."""


class ShardLoader(Generic[T_co]):
    """This rank's batches. Each ``iter()`` begins the next epoch; all ranks get the same number of batches.

    You may leave an epoch early; the next ``iter()`` then begins the next epoch. An iterator begins its epoch with the
    first batch, so unused iterators, such as Lightning makes, skip no epoch. Several threads may share an iterator:
    each batch goes to one of them.

    If the loader is part of an elastic state, the next ``iter()`` after a change of ranks yields the rest of the epoch.
    The rest is empty if the last batch was taken but the loop had not ended, so that the loop can end the epoch.

    Args:
        name: Name of the data set, for messages.
        source: Source of the rows.
        sharding: How ranks share the rows.
        options: What to read of the source, and how.
        form: Makes the form in which rows are read.
        collate: Makes the result from a batch; None for the batch itself.
        row_weights: Adds row weights to a batch, given the batch, its number of rows, and the weight of each; see
            :class:`~spark_hvd.data.readers.feed.Feed`.
    """

    __module__ = "spark_hvd.data"

    def __init__(
        self,
        name: str,
        source: DataSource,
        sharding: Sharding,
        options: ReadOptions,
        form: Callable[[], Form[Any, Any]],
        collate: Callable[[Any], T_co] | None = None,
        row_weights: Callable[[Any, int, float], None] | None = None,
    ) -> None:
        self._name, self._source, self._sharding, self._options = name, source, sharding, options
        self._form, self._collate, self._row_weights = form, collate, row_weights
        self._next = Position()
        self._now: Feed[Any] | None = None
        self._loop: weakref.ref[_Epoch[T_co]] | None = None
        self._reader: Reader[Any] | None = None
        self._process = 0
        self._place: tuple[int, int] | None = None
        self._watch()

    def __getstate__(self) -> dict[str, Any]:
        """Prepare for a process without a rank, like a DataLoader's spawned worker. It reads what this rank would."""
        rest = {"_now": None, "_loop": None, "_reader": None, "_place": self._rank_and_size()}
        return self.__dict__ | rest

    @property
    def epoch(self) -> int:
        """The number of the current epoch; before the first batch, that of the first epoch."""
        return self._position.epoch

    def set_epoch(self, epoch: int) -> None:
        """Let the next ``iter()`` begin this epoch, from 0. Not needed if epochs are read in turn."""
        if epoch < 0:
            raise ValueError(f"epoch={epoch}: expected at least 0")
        self._next, self._now = Position(epoch), None

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch, which is the same on all ranks."""
        return len(self._sharding.batches(Position(self._next.epoch), *self._rank_and_size()))

    def __iter__(self) -> Iterator[T_co]:
        """Yield the batches of an epoch; the first time after a state was loaded, the rest of its epoch.

        Raises:
            DataError: Values do not fit, a file was deleted or changed, or there are fewer rows than ranks.
        """
        rank, size = self._rank_and_size()
        if not self._sharding.batches(Position(), rank, size):
            raise DataError(too_few(self._name, self._source.rows, size))
        return _Epoch(self._begin, self._collate, self._row_weights)

    def _begin(self, epoch: _Epoch[T_co]) -> tuple[Feed[Any], int, int]:
        """Begin the next epoch. Return its feed, its number, and how many batches are left for these ranks."""
        start = self._next
        feed = Feed(self._opened(), self._sharding, *self._rank_and_size(), start)
        self._next, self._now = Position(start.epoch + 1), feed
        self._watch()
        self._loop = weakref.ref(epoch)  # alive as long as a loop holds the iterator
        # If a begun epoch has nothing left for these ranks, this pass only ends it.
        return feed, start.epoch, feed.left if feed.position.epoch == start.epoch else 0

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data as JSON-ready values, the same on all ranks, for any number of ranks.

        The position counts the batches that were taken. Call this on all ranks after the same number of batches.
        """
        return {"version": VERSION, "position": self._position.to_json(), **self._order()}

    def loop_state_dict(self) -> dict[str, Any]:
        """Return :meth:`state_dict` for a program that will run its loop anew, such as an elastic function.

        The epoch is not over until its loop ends. If all batches were taken before that, the new loop gets no batch and
        continues as the first loop would have.
        """
        loop, state = None if self._loop is None else self._loop(), self.state_dict()
        if loop is not None and self._now is not None and loop.at_end:
            state["position"] = Position(loop.number, ((0, self._source.rows),)).to_json()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a :meth:`state_dict`, with the current number of ranks. Each row of the epoch comes once.

        Raises:
            DataError: The order of the rows has changed.
        """
        now = {"version": VERSION, **self._order()}
        differ = [f"{key}={state.get(key)!r}, now {value!r}" for key, value in now.items() if state.get(key) != value]
        if differ:
            raise DataError(
                f"the state does not fit data set {self._name!r}: it was taken with {', '.join(differ)}. Expected the "
                "same data in the same order. Next: load it with those values, or restart an epoch with set_epoch"
            )
        self._next, self._now = Position.from_json(state["position"]), None

    def close(self) -> None:
        """Stop threads and free memory. Also done when the loader is garbage-collected."""
        reader, self._reader, self._now = self._reader, None, None
        if reader is not None:
            reader.close()

    def _watch(self) -> None:
        """Note that the next epoch is known, and that no iterator has begun it. A subclass may override this."""

    def _rank_and_size(self) -> tuple[int, int]:
        return (basics.rank(), basics.size()) if self._place is None or is_initialized() else self._place

    @property
    def _position(self) -> Position:
        return self._next if self._now is None else self._now.position

    def _order(self) -> dict[str, Any]:
        options = self._options
        order = {"shuffle": options.shuffle, "seed": options.seed, "window_rows": options.window_rows}
        return {"layout": self._source.layout, **order}

    def _opened(self) -> Reader[Any]:
        """Return the reader of this process; a forked process opens its own, as threads and files do not survive."""
        if self._reader is None or self._process != os.getpid():
            self._reader, self._process = self._source.open(self._options, self._form()), os.getpid()
        return self._reader


class _Epoch(Iterator[T_co]):
    def __init__(
        self,
        begin: Callable[[_Epoch[T_co]], tuple[Feed[Any], int, int]],
        collate: Callable[[Any], T_co] | None,
        row_weights: Callable[[Any, int, float], None] | None,
    ) -> None:
        self._begin, self._collate, self._row_weights = begin, collate, row_weights
        self._feed: Feed[Any] | None = None
        self.number, self._left, self._ended = 0, 0, False
        self._lock = threading.Lock()  # threads may share the iterator

    @property
    def at_end(self) -> bool:
        """Whether all batches were taken, but the loop has not seen StopIteration yet."""
        return not self._left and not self._ended

    def __next__(self) -> T_co:
        with self._lock:
            if self._feed is None:
                self._feed, self.number, self._left = self._begin(self)
            if not self._left:
                self._ended = True
                raise StopIteration
            batch = next(self._feed)
            self._left -= 1
            if self._row_weights is not None:
                self._row_weights(batch, self._feed.rows, self._feed.weight)
        result: T_co = batch if self._collate is None else self._collate(batch)
        return result


def too_few(name: str, rows: int, size: int) -> str:
    """Return the text of the error for a data set with fewer rows than ranks."""
    if not rows:
        return (
            f"data set {name!r} has no rows: expected at least one for each rank. Next: check the filters and joins "
            "that make it"
        )
    return (
        f"data set {name!r} has {count(rows, 'row')} for {count(size, 'rank')}: expected at least one for each. "
        "Next: use fewer ranks"
    )


class TorchLoader(ShardLoader[T_co], IterableDataset[T_co]):
    """Whole batches, for ``for`` loops, Lightning, and ``DataLoader(loader, batch_size=None)``.

    Each worker process of a DataLoader reads all batches and takes every n-th. ``num_workers=0`` is faster unless
    ``collate_fn`` is slow, because the loader's own threads read ahead. Workers end with their epoch, and this process
    does not learn how far they came: call ``set_epoch`` before each epoch, or all epochs use the order of the first.
    """

    __module__ = "spark_hvd.data"

    _begun: mmap.mmap | None = None
    """Shared with forked workers: for each worker's number, whether it has begun this loader's next epoch."""
    _passes = 0

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_begun": None}

    def __iter__(self) -> Iterator[T_co]:
        worker = get_worker_info()
        if worker is None:
            return super().__iter__()
        if self._begun is not None:
            slot = worker.id % len(self._begun)
            if self._begun[slot] and not self._passes and self._options.shuffle and worker.id == 0:
                warnings.warn(
                    f"a DataLoader with num_workers={worker.num_workers} repeats epoch {self._next.epoch} of data set "
                    f"{self._name!r} in the same order: its workers are new, and begin where the loader in the "
                    "parent process is. Call set_epoch(epoch) of the loader before each epoch, or pass "
                    "persistent_workers=True, or num_workers=0",
                    RuntimeWarning,
                    stacklevel=2,
                )
            self._begun[slot], self._passes = 1, self._passes + 1
        return itertools.islice(super().__iter__(), worker.id, None, worker.num_workers)

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self._watch()

    def state_dict(self) -> dict[str, Any]:
        """See base class.

        Raises:
            RuntimeError: Worker processes of a DataLoader read the batches, and none knows how far the others are.
        """
        if get_worker_info() is not None or (self._begun is not None and self._begun.find(b"\1") >= 0):
            raise RuntimeError(
                "state_dict where worker processes of a DataLoader read the batches: expected num_workers=0, so that "
                "one process counts them"
            )
        return super().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._watch()

    def _watch(self) -> None:
        if get_worker_info() is not None:
            return
        if self._begun is None:
            self._begun = mmap.mmap(-1, mmap.PAGESIZE)
        self._begun[:] = bytes(len(self._begun))  # in place, as workers may persist between epochs
