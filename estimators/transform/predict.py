"""The Python side of transform and predict: Arrow batches in, Arrow batches of outputs out, on Spark's executors.

A Python worker, which Spark keeps for many tasks, loads a model once and keeps it until others evict it.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import pandas as pd
import pyarrow as pa
import torch

from spark_hvd.data.readers.dataset import listed
from spark_hvd.estimators.errors import ModelError
from spark_hvd.estimators.training.head import Head
from spark_hvd.estimators.training.inputs import outputs_of
from spark_hvd.estimators.transform.declared import squeezed, taken
from spark_hvd.estimators.transform.feeds import Arguments, ModelFeed
from spark_hvd.estimators.transform.models import ModelSource, memory_named, model_of
from spark_hvd.estimators.transform.outputs import Output, Values, to_arrow
from spark_hvd.runner.rank.gpus import ordinal_of
from spark_hvd.world.env import share_cores
from spark_hvd.world.words import count

T = TypeVar("T")
_AHEAD = 2
"""Number of calls to prepare, decode and move to the device while the model computes the previous one."""


@dataclass(frozen=True)
class Prediction:
    """Everything that a Python worker needs.

    ``outputs`` is the number of tensors, by position; None if ``plan`` declares names and types.
    """

    model: ModelSource
    feed: ModelFeed
    plan: tuple[Output, ...]
    outputs: int | None
    head: Head
    batch_size: int
    use_gpu: bool


def arrow_function(job: Prediction) -> Callable[[Iterator[pa.Array]], Iterator[pa.Array]]:
    """Return ``job`` as a function for ``pyspark.sql.functions.arrow_udf``."""

    def predict(batches: Iterator[pa.Array]) -> Iterator[pa.Array]:
        yield from predictions(job, batches)

    return predict


def pandas_function(
    job: Prediction, times: Mapping[str, str]
) -> Callable[[Iterator[pd.DataFrame]], Iterator[pd.DataFrame]]:
    """Return ``job`` as a function for ``pandas_udf``, for Spark before 4.1.

    ``times`` has the zones of the fields that hold times in microseconds since 1970.
    """

    def predict(batches: Iterator[pd.DataFrame]) -> Iterator[pd.DataFrame]:
        for result in predictions(job, (_from_pandas(batch, times) for batch in batches)):
            columns = zip(result.flatten(), job.plan, strict=True)
            yield pd.DataFrame({f"c{i}": _to_pandas(*column) for i, column in enumerate(columns)})

    return predict


def predictions(job: Prediction, batches: Iterator[pa.Array]) -> Iterator[pa.Array]:
    """Yield the outputs for the rows of each batch, a struct of the feed's columns.

    Raises:
        DataError: A column has nulls, or lists of different lengths.
        ModelError: The model cannot be loaded, fails, or returns something unexpected.
    """
    cores, device = _resources(job.use_gpu)
    share_cores(cores)
    torch.set_num_threads(cores)  # with torch's default, each of several tasks would start a thread per core
    model = model_of(job.model, device)
    set_device = partial(torch.cuda.set_device, device) if device.type == "cuda" else None
    pool = ThreadPoolExecutor(1, "spark_hvd-predict", set_device)  # one, because not every tokenizer is thread-safe
    try:
        parts: list[list[Values]] = []
        for window, arguments in _ahead(_begun(job, batches, device, pool)):
            if arguments is not None:
                parts.append(_outputs(model, arguments.result(), job))
            if len(parts) == window.count:
                yield _together(parts, window.order, job)
                parts = []
    finally:
        pool.shutdown(cancel_futures=True)


class _Window:
    """The calls of a window; one thread must make them."""

    def __init__(self, job: Prediction, rows: pa.Array, device: torch.device) -> None:
        self.count = -(-len(rows) // job.batch_size)
        self.order: Any = None
        self._left = self.count
        self._begin: Callable[[], tuple[Iterator[Arguments], Any]] | None
        self._begin = partial(job.feed.calls, rows, job.batch_size, device)
        self._calls: Iterator[Arguments] = iter(())

    def next(self) -> Arguments:
        """Make the arguments of the next call."""
        if self._begin is not None:
            self._calls, self.order = self._begin()
            self._begin = None  # drop the reference: it holds the rows
        call = next(self._calls)
        self._left -= 1
        if not self._left:
            self._calls = iter(())  # drop the reference: the calls hold the columns
        return call


def _begun(
    job: Prediction, batches: Iterator[pa.Array], device: torch.device, pool: ThreadPoolExecutor
) -> Iterator[tuple[_Window, Future[Arguments] | None]]:
    """Have the pool make each window's calls; None stands for a window without rows."""
    for rows in job.feed.windows(batches):
        window = _Window(job, rows, device)
        if not window.count:
            yield window, None
        for _ in range(window.count):
            yield window, pool.submit(window.next)


def _ahead(items: Iterator[T]) -> Iterator[T]:
    """Yield the same items, but read some of them ahead.

    It reads ahead before it yields an item; otherwise the thread would not work during the model's call if a window
    has few calls.
    """
    pending: deque[T] = deque()
    for item in items:
        pending.append(item)
        if len(pending) > _AHEAD:
            yield pending.popleft()
    yield from pending


def _outputs(model: Any, arguments: Arguments, job: Prediction) -> list[Values]:
    """Return the model's outputs for some rows, on the CPU."""
    with (
        memory_named(f"a batch of {arguments.rows} rows", "Use a smaller batch_size, or truncate the longest rows. "),
        torch.inference_mode(),
    ):
        try:
            result = model(*arguments.positional, **arguments.named)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise ModelError(
                f"the model failed on a batch of {arguments.rows} rows, called with ({arguments}): "
                f"{type(error).__name__}: {error}"
            ) from error
        if job.outputs is None:
            return taken(result, job.plan, arguments.rows)
        outputs = _tensors(result, arguments.rows)
    if len(outputs) != job.outputs:
        raise ModelError(f"the model returns {len(outputs)} outputs, expected {job.outputs}")
    return list(outputs)


def run(model: Any, inputs: list[torch.Tensor], labels: Sequence[str] = ()) -> list[torch.Tensor]:
    """Return the outputs of a model that takes tensors for some rows, on the CPU.

    Raises:
        ModelError: An output has another number of rows than the inputs; or outputs have the names of ``labels``, but
            in another order, although they are compared by position.
    """
    result, outputs = called(model, inputs)
    check_order(result, labels)
    return outputs


def called(model: Any, inputs: list[torch.Tensor]) -> tuple[Any, list[torch.Tensor]]:
    """Return the result of a model for some rows, and its outputs; see :func:`run`."""
    with torch.inference_mode():
        result = model(*inputs)
        return result, _tensors(result, len(inputs[0]))


def check_order(result: Any, labels: Sequence[str]) -> None:
    """Check the order of named outputs; see :func:`run`."""
    if isinstance(result, Mapping) and (names := list(result)) != list(labels) and set(names) == set(labels):
        raise ModelError(
            f"the model returns a dict with {listed(names)}, but the labels are {listed(labels)}: outputs are taken in "
            "order, regardless of their names. List the labels in the order of the model"
        )


def _tensors(result: Any, rows: int) -> list[torch.Tensor]:
    outputs = [output.cpu() for output in outputs_of(result)]
    for number, output in enumerate(outputs):
        if not output.ndim or len(output) != rows:
            raise ModelError(
                f"output {number} of the model has the shape {tuple(output.shape)} for {count(rows, 'row')}: its first "
                f"number must be the number of rows{squeezed(rows)}"
            )
    return outputs


def _together(parts: list[list[Values]], order: Any, job: Prediction) -> pa.StructArray:
    """Return the columns of a window, joined from ``parts``, whose rows have the positions ``order``."""
    back = None if order is None else np.argsort(order)
    if not parts:
        return pa.array([], pa.struct([(f"c{i}", output.arrow_type) for i, output in enumerate(job.plan)]))
    joined: list[Values] = []
    for each in zip(*parts, strict=True):
        if not all(isinstance(values, torch.Tensor) and values.shape[1:] == each[0].shape[1:] for values in each):
            arrays = pa.concat_arrays([to_arrow(part, job.plan, job.head) for part in parts])
            return arrays if back is None else arrays.take(pa.array(back))
        tensor = torch.cat(each) if len(each) > 1 else each[0]
        joined.append(tensor if back is None else tensor[torch.from_numpy(back)])
    return to_arrow(joined, job.plan, job.head)


def _resources(use_gpu: bool) -> tuple[int, torch.device]:
    """Return the cores and the device of this task: the GPU that Spark assigned, or one chosen by its partition."""
    from pyspark import TaskContext

    task = TaskContext.get()
    cores = max(1, int(task.cpus())) if task else 1
    if not (use_gpu and torch.cuda.is_available()):
        return cores, torch.device("cpu")
    assigned = task.resources().get("gpu") if task else None
    gpus = torch.cuda.device_count()
    if not assigned:
        return cores, torch.device("cuda", (task.partitionId() if task else 0) % gpus)
    uuids = [str(getattr(torch.cuda.get_device_properties(number), "uuid", "")) for number in range(gpus)]
    number = ordinal_of(assigned.addresses[0], os.environ.get("CUDA_VISIBLE_DEVICES"), uuids)
    return cores, torch.device("cuda", number)


def _from_pandas(frame: pd.DataFrame, times: Mapping[str, str]) -> pa.StructArray:
    arrays = []
    for name in frame.columns:
        array = pa.array(frame[name].to_numpy(), from_pandas=False)  # pandas' own conversion turns NaN into null
        if name in times:
            array = array.cast(pa.timestamp("us", times[name]))
        elif pa.types.is_timestamp(array.type) or pa.types.is_duration(array.type):  # Python has no nanoseconds
            array = array.cast(pa.timestamp("us") if pa.types.is_timestamp(array.type) else pa.duration("us"))
        arrays.append(array)
    return pa.StructArray.from_arrays(arrays, names=[str(name) for name in frame.columns])


def _to_pandas(array: pa.Array, output: Output) -> Any:
    """Return a column of outputs. Pandas' own types would make NaN null, and whole numbers beside a null floats.

    Raises:
        ModelError: Lists of floating point numbers have None, which becomes the same as NaN.
    """
    if not output.depth:
        return pd.Series(pd.arrays.ArrowExtensionArray(array))
    values = array
    for _ in range(output.depth):
        values = values.flatten()
    if not values.null_count:
        return array.to_pandas()
    if pa.types.is_floating(values.type):
        raise ModelError(
            f"output {output.name!r} of the model has None within lists of {output.element}, which Spark before 4.1 "
            "cannot tell from NaN: return NaN instead"
        )
    return pd.Series(array.to_pylist(), dtype=object)
