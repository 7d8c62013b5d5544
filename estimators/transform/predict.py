"""The Python side of transform: Arrow batches of features in, Arrow batches of outputs out, on Spark's executors.

A model is loaded once in each Python worker, which Spark keeps for many tasks, and stays until others push it out.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa
import torch

from spark_hvd.data.readers.errors import DataError
from spark_hvd.data.readers.tensors import to_tensor
from spark_hvd.estimators.errors import ModelError
from spark_hvd.estimators.training.head import Head
from spark_hvd.estimators.training.inputs import TensorSpec, outputs_of, stacked
from spark_hvd.estimators.training.packing import PackedModule, unpack
from spark_hvd.estimators.transform.outputs import Output, Shape, to_arrow
from spark_hvd.runner.rank.gpus import ordinal_of

if TYPE_CHECKING:
    from pyspark import Broadcast

MODELS_KEPT = 4
"""How many models a worker keeps loaded; the one not used for longest goes first."""
_loaded: OrderedDict[tuple[str, str], Any] = OrderedDict()


@dataclass(frozen=True)
class Prediction:
    """All that a Python worker is told.

    Inputs are in the order of the struct's fields, decoders by the name of their column, and shapes those of one row.
    """

    packed: PackedModule | Broadcast[PackedModule]
    digest: str
    inputs: tuple[TensorSpec, ...]
    decoders: Mapping[str, Callable[[bytes], Any]]
    shapes: tuple[Shape, ...]
    plan: tuple[Output, ...]
    head: Head
    batch_size: int
    use_gpu: bool


def arrow_function(job: Prediction) -> Callable[[Iterator[pa.Array]], Iterator[pa.Array]]:
    """``job`` as what ``pyspark.sql.functions.arrow_udf`` takes."""

    def predict(batches: Iterator[pa.Array]) -> Iterator[pa.Array]:
        yield from predictions(job, batches)

    return predict


def pandas_function(job: Prediction) -> Callable[[Iterator[pd.DataFrame]], Iterator[pd.DataFrame]]:
    """``job`` as what ``pandas_udf`` takes, for Spark before 4.1."""

    def predict(batches: Iterator[pd.DataFrame]) -> Iterator[pd.DataFrame]:
        for result in predictions(job, map(_from_pandas, batches)):
            yield pa.Table.from_struct_array(result).to_pandas()

    return predict


def predictions(job: Prediction, batches: Iterator[pa.Array]) -> Iterator[pa.Array]:
    """The outputs for each batch, a struct of features.

    Raises:
        DataError: nulls, or lists of different lengths, in a feature.
        ModelError: the model returns another number of outputs or of rows than expected.
    """
    cores, device = _resources(job.use_gpu)
    torch.set_num_threads(cores)  # tasks run side by side: each with torch's default would start a thread for all cores
    model = _model(job, device)
    for batch in batches:
        columns = [feature(array, spec, job.decoders) for array, spec in zip(batch.flatten(), job.inputs, strict=True)]
        parts = []
        for at in range(0, len(batch), job.batch_size):
            pieces = (column[at : at + job.batch_size] for column in columns)
            inputs = [spec.of(each, device) for spec, each in zip(job.inputs, pieces, strict=True)]
            parts.append(run(model, stacked(job.inputs, inputs)))
        outputs = [torch.cat(each) for each in zip(*parts, strict=True)]
        if not parts:
            outputs = [torch.empty(0, *shape) for shape in job.shapes]
        if len(outputs) != len(job.shapes):
            raise ModelError(f"the model returns {len(outputs)} outputs, expected {len(job.shapes)}")
        yield to_arrow(outputs, job.plan, job.head)


def run(model: Any, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The model's outputs for some rows, on the CPU.

    Raises:
        ModelError: an output has another number of rows than the inputs.
    """
    with torch.inference_mode():
        outputs = [output.cpu() for output in outputs_of(model(*inputs))]
    rows = len(inputs[0])
    for number, output in enumerate(outputs):
        if not output.ndim or len(output) != rows:
            raise ModelError(
                f"output {number} of the model has the shape {tuple(output.shape)} for {rows} rows: its first number "
                "must be that of the rows"
            )
    return outputs


def feature(array: pa.Array, spec: TensorSpec, decoders: Mapping[str, Callable[[bytes], Any]]) -> torch.Tensor:
    """A feature's values (rows, *shape).

    Raises:
        DataError: there are nulls, or rows of different shapes.
    """
    column = spec.column
    if column.name not in decoders:
        return to_tensor(array, column, "transform")
    if array.null_count:
        raise DataError(f"column {column.name!r} has {array.null_count} null(s) in {len(array)} rows of transform")
    decoded = [np.asarray(decoders[column.name](value)) for value in array.to_pylist()]
    if len({value.shape for value in decoded}) > 1:
        raise DataError(f"column {column.name!r}: the decoder returns arrays of different shapes in transform")
    return torch.from_numpy(np.stack(decoded)) if decoded else torch.empty(0, *(column.shape or ()))


def _model(job: Prediction, device: torch.device) -> Any:
    key = (job.digest, str(device))
    if key not in _loaded:
        packed = job.packed if isinstance(job.packed, PackedModule) else job.packed.value
        _loaded[key] = unpack(packed).to(device).eval()
    _loaded.move_to_end(key)
    while len(_loaded) > MODELS_KEPT:
        _loaded.popitem(last=False)
    return _loaded[key]


def _resources(use_gpu: bool) -> tuple[int, torch.device]:
    """The cores of this task and its device: the GPU that Spark gave it, else one of those there, by partition."""
    from pyspark import TaskContext

    task = TaskContext.get()
    cores = max(1, int(task.cpus())) if task else 1
    if not (use_gpu and torch.cuda.is_available()):
        return cores, torch.device("cpu")
    assigned = task.resources().get("gpu") if task else None
    there = torch.cuda.device_count()
    if not assigned:
        return cores, torch.device("cuda", (task.partitionId() if task else 0) % there)
    uuids = [str(getattr(torch.cuda.get_device_properties(number), "uuid", "")) for number in range(there)]
    number = ordinal_of(assigned.addresses[0], os.environ.get("CUDA_VISIBLE_DEVICES"), uuids)
    return cores, torch.device("cuda", number)


def _from_pandas(frame: pd.DataFrame) -> pa.StructArray:
    # from numpy arrays: pandas' own conversion takes NaN for null
    arrays = [pa.array(frame[name].to_numpy(), from_pandas=False) for name in frame.columns]
    return pa.StructArray.from_arrays(arrays, names=[str(name) for name in frame.columns])
