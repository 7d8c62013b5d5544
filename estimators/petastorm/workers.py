"""Petastorm's pools and worker, adapted to read given pieces of row groups instead of shuffling an epoch."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from spark_hvd.data.readers.dataset import listed
from spark_hvd.data.readers.errors import DataError
from spark_hvd.data.readers.files import where
from spark_hvd.data.readers.reader import ReaderSpec
from spark_hvd.data.readers.windows import Piece
from spark_hvd.estimators.errors import EstimatorError
from spark_hvd.estimators.petastorm.bridge import install
from spark_hvd.estimators.petastorm.parquet import ParquetDatasetPiece
from spark_hvd.store.errors import StoreError

install()

from petastorm.arrow_reader_worker import ArrowReaderWorker  # noqa: E402
from petastorm.cache import NullCache  # noqa: E402
from petastorm.reader_impl.pickle_serializer import PickleSerializer  # noqa: E402
from petastorm.unischema import Unischema, UnischemaField  # noqa: E402
from petastorm.workers_pool.dummy_pool import DummyPool  # noqa: E402
from petastorm.workers_pool.process_pool import ProcessPool  # noqa: E402
from petastorm.workers_pool.thread_pool import ThreadPool  # noqa: E402

START_SECONDS = 300

Arrays = list[tuple[np.ndarray[Any, Any], Any]]
"""Blocks as numpy arrays of bits, each with its torch dtype."""


class PieceWorker(ArrowReaderWorker):  # type: ignore[misc]
    """Reads pieces as Petastorm reads row groups, and turns them into the arrays of a batch's blocks.

    Errors are published instead of arrays: an exception raised here would end the worker and print a traceback.
    """

    def __init__(self, worker_id: int, publish: Any, arguments: tuple[Any, ...]) -> None:
        *inherited, spec = arguments
        super().__init__(worker_id, publish, inherited)
        self._spec: ReaderSpec = spec
        self._dataset = _NoPartitions()  # otherwise every worker would list the directory
        self._values: Any = None

    def process(self, number: int, piece: Piece) -> None:
        """Publish (number, arrays or exception)."""
        try:
            result: Arrays | Exception = self._arrays(piece)
        except (DataError, EstimatorError, StoreError) as error:
            result = error
        except Exception as error:
            group = self._spec.dataset.row_groups[piece.group]
            result = DataError(f"cannot read {where(group)}: {type(error).__name__}: {error}")
        self.publish_func((number, result))

    def _arrays(self, piece: Piece) -> Arrays:
        from torch import bfloat16, int16

        if self._values is None:  # here and not above: torch loads slowly, and the pool waits for its processes
            from spark_hvd.data.readers.batches import Layout
            from spark_hvd.data.readers.values import Values, columns_yielded

            self._values = Values(self._spec, Layout(columns_yielded(self._spec), self._spec.stack))
        group = self._spec.dataset.row_groups[piece.group]
        source = ParquetDatasetPiece(self._spec.store.inner_path(group.file), self._filesystem.open, group.index)
        table = self._load_rows(None, source, (0, 1))
        if table.num_rows != group.rows:
            raise DataError(
                f"{where(group)} has {table.num_rows} rows, expected {group.rows}: the file has changed; call fit again"
            )
        missing = set(self._schema.fields) - set(table.column_names)
        if missing:
            raise DataError(f"{where(group)} has no column {listed(sorted(missing))}: it differs from the other files")
        blocks = self._values.blocks_of(table.slice(piece.start, piece.rows), where(group))
        # numpy has no bfloat16, and a pickled tensor would include all the memory that it is a view of
        return [((block.view(int16) if block.dtype == bfloat16 else block).numpy(), block.dtype) for block in blocks]


class _NoPartitions:
    partitions = None


class InterruptibleThreadPool(ThreadPool):  # type: ignore[misc]
    """Petastorm's thread pool, whose ``get_results`` can be interrupted from another thread."""

    def interrupt(self) -> None:
        """Make ``get_results`` raise."""
        self._results_queue.put(RuntimeError("interrupted"))


class CallersPool(DummyPool):  # type: ignore[misc]
    """Petastorm's dummy pool, which works in the caller, where there is nothing to interrupt."""

    def interrupt(self) -> None:
        """Do nothing."""


class WatchedProcessPool(ProcessPool):  # type: ignore[misc]
    """Petastorm's process pool, which would wait forever for a killed process, and 20 seconds for one to start."""

    def _wait_for_workers_to_start(self) -> None:
        self._worker_poller = _WorkerPoller(self._results_receiver_poller, self._workers)
        self._results_receiver_poller: Any = self._worker_poller
        deadline = time.monotonic() + START_SECONDS
        try:
            for _ in self._workers:
                while not self._worker_poller.poll(100):
                    if time.monotonic() > deadline:
                        raise EstimatorError(
                            f"Petastorm's {self.workers_count} reader processes did not start in {START_SECONDS} s: "
                            "use fewer reader workers, or reader_pool_type='thread'"
                        )
                self._results_receiver.recv_pyobj()
        except BaseException:
            for process in self._workers:
                process.kill()
            self.join()
            raise

    def interrupt(self) -> None:
        """Make ``get_results`` raise, within a tenth of a second."""
        self._worker_poller.interrupted = True


class _WorkerPoller:
    def __init__(self, poller: Any, processes: list[Any]) -> None:
        self._poller, self._processes = poller, processes
        self.interrupted = False

    def poll(self, timeout: float) -> Any:
        if self.interrupted:
            raise RuntimeError("interrupted")
        found = self._poller.poll(timeout)
        codes = [process.returncode for process in self._processes if process.poll() is not None]
        if not found and codes:
            raise EstimatorError(
                f"a reader process ended with exit code {codes[0]} (-9: killed, mostly for lack of memory; otherwise "
                "its error is above): use fewer reader workers, smaller row groups, or reader_pool_type='thread'"
            )
        return found


def start_pool(spec: ReaderSpec) -> Any:
    """Start a pool of ``spec.workers`` that takes ``ventilate(number=..., piece=...)``; results come in any order."""
    from spark_hvd.data.readers.values import columns_read

    pools: dict[str, Callable[[], Any]] = {
        "thread": lambda: InterruptibleThreadPool(spec.workers),
        "process": lambda: WatchedProcessPool(spec.workers, PickleSerializer()),
        "dummy": lambda: CallersPool(),
    }
    pool = pools[spec.pool]()
    schema = Unischema("read", [UnischemaField(column.name, None, ()) for column in columns_read(spec)])
    # in the order that Petastorm's worker expects, followed by ours
    where_from = (spec.store.filesystem, spec.dataset.url)
    pool.start(PieceWorker, (*where_from, schema, None, [], NullCache(), None, schema, None, False, 0, spec))
    return pool
