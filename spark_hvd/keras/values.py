"""Collectives of values: they accept numbers, arrays and tensors of Keras' backend, and return numpy arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import torch

from spark_hvd.collectives.compression import Compression
from spark_hvd.collectives.process_set import ProcessSet, global_process_set
from spark_hvd.torch import move, reduce
from spark_hvd.transport.communicator import ReduceOp

Array = np.ndarray[Any, Any]


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: ReduceOp | None = None,
    compression: Any = Compression.none,
    process_set: ProcessSet = global_process_set,
) -> Array:
    """Reduce a value over all ranks: a number, array, tensor or Keras variable, of the same shape on every rank.

    See :func:`spark_hvd.torch.allreduce` for the other arguments and the errors.
    """
    return _through(
        value,
        lambda tensor: reduce.allreduce(
            tensor, average, name, compression, op, prescale_factor, postscale_factor, process_set
        ),
    )


def allgather(value: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Array:
    """Concatenate all ranks' values along the first dimension; see :func:`spark_hvd.torch.allgather`."""
    return _through(value, lambda tensor: move.allgather(tensor, name, process_set))


def broadcast(
    value: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Array:
    """Return one rank's value; see :func:`spark_hvd.torch.broadcast`."""
    return _through(value, lambda tensor: move.broadcast(tensor, root_rank, name, process_set))


def reducescatter(
    value: Any, name: str | None = None, op: ReduceOp = ReduceOp.AVERAGE, process_set: ProcessSet = global_process_set
) -> Array:
    """Return this rank's share of the reduced value; see :func:`spark_hvd.torch.reducescatter`."""
    return _through(value, lambda tensor: reduce.reducescatter(tensor, name=name, op=op, process_set=process_set))


def _through(value: Any, collective: Callable[[torch.Tensor], torch.Tensor]) -> Array:
    tensor = torch.from_numpy(np.array(keras.ops.convert_to_numpy(value)))  # a copy: it may be the user's memory
    result: Array = collective(tensor).numpy()
    return result
