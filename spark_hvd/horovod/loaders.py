"""Base classes for loaders of programs that use ``horovod.data``: ``_iterate`` yields batches, a thread reads ahead."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from queue import Empty, Full, Queue
from typing import Any


class BaseDataLoader:
    """A loader; subclasses define ``__len__`` and ``_iterate``, and may define ``_process_batch``."""

    def __len__(self) -> int:
        raise NotImplementedError(f"{type(self).__name__}.__len__: the number of batches; define it")

    def _iterate(self) -> Iterator[Any]:
        raise NotImplementedError(f"{type(self).__name__}._iterate: yields batches; define it")

    def _process_batch(self, batch: Any) -> Any:
        return batch

    def __iter__(self) -> Iterator[Any]:
        for batch in self._iterate():
            yield self._process_batch(batch)


class _EpochEnd:
    """Marks the end of an epoch in the queue, with the error that ended it, if any."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


class AsyncDataLoaderMixin:
    """Put this before a BaseDataLoader among the bases of a class: a thread then reads batches ahead, in every epoch.

    Args:
        async_loader_queue_size: Maximum number of batches read ahead; 0: none.
        debug_data_loader: Accepted for Horovod's sake; has no effect.
    """

    def __init__(
        self, async_loader_queue_size: int = 64, debug_data_loader: bool = False, *args: Any, **kwargs: Any
    ) -> None:
        self.async_loader_queue_size = async_loader_queue_size
        self.debug_data_loader = debug_data_loader
        super().__init__(*args, **kwargs)
        self._ahead: Queue[Any] = Queue(max(async_loader_queue_size, 1))
        self._closed = threading.Event()
        self._reader: threading.Thread | None = None

    def close_async_loader(self) -> None:
        """End the thread; batches that were read ahead are dropped."""
        self._closed.set()
        if self._reader is not None:
            self._reader.join()
            self._reader = None
        while True:
            try:
                self._ahead.get_nowait()
            except Empty:
                return

    def __iter__(self) -> Iterator[Any]:
        if self.async_loader_queue_size <= 0:
            yield from super().__iter__()  # type: ignore[misc] # of the loader that is mixed with
            return
        if self._reader is None:
            self._closed.clear()
            self._reader = threading.Thread(target=self._read, daemon=True, name="spark_hvd-loader")
            self._reader.start()
        while True:
            batch = self._ahead.get()
            if not isinstance(batch, _EpochEnd):
                yield self._process_batch(batch)  # type: ignore[attr-defined]
                continue
            if batch.error is not None:
                self._reader = None
                raise batch.error
            return

    def _read(self) -> None:
        try:
            while not self._closed.is_set():
                for batch in self._iterate():  # type: ignore[attr-defined]
                    if not self._put(batch):
                        return
                if not self._put(_EpochEnd()):
                    return
        except BaseException as error:  # such as sys.exit(): the program would wait for the next batch for ever
            self._put(_EpochEnd(error))

    def _put(self, batch: Any) -> bool:
        while not self._closed.is_set():
            try:
                self._ahead.put(batch, timeout=0.1)
            except Full:
                continue
            return True
        return False
