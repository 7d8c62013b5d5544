"""A rank's batches as global arrays of one shape, so that JAX compiles a step only once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from spark_hvd.jax.trees import over_devices, placed


def global_batches(
    batches: Iterable[Mapping[str, Any]], batch_size: int, *, sharding: Any = None, mask: str = "mask"
) -> Iterator[dict[str, Any]]:
    """Make one global array of the rows of all ranks, for each array of a batch.

    JAX's ranks run one program, so a batch must have the same shape on all of them. A batch with fewer rows, such as
    the last of an epoch, is filled up with copies of its first row. The mask says which rows count: ``sum(mask *
    losses) / sum(mask)`` is the mean over the rows of all ranks, however many each has.

    Args:
        batches: Dicts of numpy arrays, (rows, ...), with at most `batch_size` rows; equally many on all ranks. Pass
            ``shard.numpy_batches(batch_size)``, wrapped in ``hvd.progress`` if you like.
        batch_size: Rows of this rank in each array; the same on all ranks.
        sharding: A sharding over the devices of all ranks that divides the first dimension among the ranks in their
            order. None divides the rows over all devices.
        mask: The name of an array to add, (rows of all ranks,) of float32: 1 for a row, 0 for a copy.

    Yields:
        Dicts of ``jax.Array``, (ranks * batch_size, ...), in 32 bits unless ``jax_enable_x64`` is set.

    Raises:
        ValueError: A batch has more rows than `batch_size`, arrays of different lengths, numbers that JAX would
            truncate to 32 bits, or an array called `mask`; or the rows cannot be divided evenly over this rank's
            devices.
        TypeError: A batch has anything but arrays of numbers.
    """
    if sharding is None:
        sharding, devices = over_devices("data"), jax.local_device_count()
        if batch_size < 1 or batch_size % devices:
            raise ValueError(f"batch_size={batch_size}: expected a multiple of {devices}, the devices of this rank")
    for batch in batches:
        rows = _rows(batch, batch_size, mask)
        real = np.zeros(batch_size, np.float32)
        real[:rows] = 1
        filled = {name: _filled(array, batch_size) for name, array in batch.items()}
        yield {name: placed(array, sharding, name) for name, array in {**filled, mask: real}.items()}


def _rows(batch: Mapping[str, Any], batch_size: int, mask: str) -> int:
    if mask in batch:
        raise ValueError(f"mask={mask!r}: the batch has an array of this name; expected another name for the mask")
    for name, array in batch.items():
        if not isinstance(array, np.ndarray) or not array.ndim:
            raise TypeError(
                f"{name!r} of a batch is a {type(array).__name__}: expected a numpy array of rows. Leave the "
                "column out by columns=, or convert it to numbers in Spark"
            )
    lengths = {name: len(array) for name, array in batch.items()}
    if len({*lengths.values()}) != 1:
        raise ValueError(f"a batch has {lengths or 'no arrays'}: expected arrays with equally many rows")
    rows = next(iter(lengths.values()))
    if rows > batch_size:
        raise ValueError(f"a batch has {rows} rows: expected at most batch_size={batch_size}, the loader's value")
    return rows


def _filled(array: np.ndarray[Any, Any], rows: int) -> np.ndarray[Any, Any]:
    missing = rows - len(array)
    if not missing:
        return array
    first = array[:1] if len(array) else np.zeros((1, *array.shape[1:]), array.dtype)
    return np.concatenate([array, np.repeat(first, missing, axis=0)])
