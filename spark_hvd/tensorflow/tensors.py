"""Shares memory between TensorFlow's tensors and torch's, and runs torch collectives as operations of TensorFlow.

TensorFlow reads a tensor's memory in units of 64 bytes, and aborts the process if the memory is not aligned to them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import tensorflow as tf
import torch
from torch.utils.dlpack import from_dlpack

from spark_hvd.torch.gradients import Call, Derivable

_ALIGNMENT = 64
_NUMBERS = {
    tf.float16, tf.float32, tf.float64, tf.bfloat16, tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8, tf.uint16,
    tf.uint32, tf.uint64, tf.bool, tf.complex64, tf.complex128,
}  # fmt: skip
"""DLPack may abort the process for other dtypes."""
F = TypeVar("F", bound=Callable[..., Any])


_raised: Exception | None = None
"""The last exception raised here. TensorFlow replaces an exception that leaves a graph with its own, with this text."""


def cause_of(error: Exception) -> Exception | None:
    """Return the exception of a collective inside a graph that caused `error`, once; None if it is something else."""
    global _raised
    if _raised is None or f"{type(_raised).__name__}: {_raised}" not in str(error):
        return None
    cause, _raised = _raised, None  # it keeps the tensors of its frames alive
    return cause


def unconverted(function: F) -> F:
    """Keep AutoGraph from rewriting one of our functions, whose conditions are Python's, when it traces a graph."""
    return cast(F, tf.autograph.experimental.do_not_convert(function))


def to_torch(tensor: Any) -> torch.Tensor:
    """Return a torch tensor with the same memory, for reading only: other operations may read it, too."""
    return from_dlpack(tf.experimental.dlpack.to_dlpack(tensor))


def to_tensorflow(tensor: torch.Tensor) -> Any:
    """Return a TensorFlow tensor with the same memory, or a copy if TensorFlow cannot use that memory."""
    tensor = tensor.contiguous()
    if tensor.data_ptr() % _ALIGNMENT:
        tensor = tensor.clone()
    return tf.experimental.dlpack.from_dlpack(tensor.__dlpack__())


def through(
    function: Callable[..., Sequence[torch.Tensor]], tensors: Sequence[Any], dtypes: Sequence[Any]
) -> list[Any]:
    """Return the result of a function of torch tensors, computed now or, in a graph, whenever that runs.

    Raises:
        TypeError: A tensor holds text or other values that are not numbers.
    """
    for tensor in tensors:
        if tensor.dtype not in _NUMBERS:
            raise TypeError(f"a tensor of dtype {tensor.dtype.name}: collectives move numbers and booleans")

    def run(*values: Any) -> list[Any]:
        global _raised
        try:
            return [to_tensorflow(each) for each in function(*map(to_torch, values))]
        except Exception as error:
            _raised = error
            raise

    if tf.executing_eagerly():
        return run(*tensors)
    if tf.inside_function():
        return list(tf.py_function(run, list(tensors), list(dtypes)))
    # A session runs ready operations in any order, in few threads. Each thread would wait for another collective on
    # another rank, and none would be left for those. So each operation has its own thread, by way of a data set.
    options = tf.data.Options()
    options.threading.private_threadpool_size = 1
    given = tf.data.Dataset.from_tensors(tuple(tensors))
    found = given.map(lambda *values: tuple(tf.py_function(run, values, list(dtypes)))).with_options(options)
    start = tuple(tf.zeros((), dtype) for dtype in dtypes)
    return list(found.reduce(start, lambda _, values: values))


def apply(
    kind: type[Derivable],
    tensors: Sequence[Any],
    call: Call,
    *,
    kept: Sequence[Any] = (),
    more: Sequence[Any] = (),
    splits: Any = None,
    rows: bool = False,
) -> list[Any]:
    """Run a collective on tensors. Gradients flow through it.

    Args:
        kind: The collective.
        tensors: TensorFlow's tensors.
        call: The arguments of the collective.
        kept: Dtypes of what its derivative needs.
        more: Dtypes of results beyond one for each tensor.
        splits: A tensor, if `call` gets its splits only at run time.
        rows: Whether the first dimensions of results differ from those of the tensors.
    """
    count = len(tensors) + len(more)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def collective(*given: Any) -> tuple[Any, Callable[..., Any]]:
        def forward(*values: torch.Tensor) -> list[torch.Tensor]:
            now = call if splits is None else replace(call, splits=values[-1])
            results, needed = kind.forward(now, values[: len(given)], keep=bool(kept))
            return [*results, *needed]

        taken = given if splits is None else (*given, splits)
        found = through(forward, taken, [*(each.dtype for each in given), *more, *kept])
        results, needed = found[:count], found[count:]
        for result, each in zip(results, given, strict=False):
            result.set_shape(_later_rows(each.shape) if rows else each.shape)

        def gradient(*grads: Any) -> list[Any]:
            now = call
            # In a plain graph, results may be derived one by one, at the same time. Elsewhere there is an order, and
            # eager ranks must match ranks in a function: their names must be the same.
            if call.name is not None and not tf.executing_eagerly() and not tf.inside_function():
                unique = tf.compat.v1.get_default_graph().unique_name("spark_hvd_derived")
                now = replace(call, name=f"{call.name}.{unique}")

            def backward(*values: torch.Tensor) -> Sequence[torch.Tensor]:
                return kind.backward(now, values[: len(needed)], values[len(needed) :])

            wanted = grads[: len(given)]
            parts = through(backward, [*needed, *wanted], [each.dtype for each in wanted])
            return [tf.reshape(part, tf.shape(each)) for part, each in zip(parts, given, strict=True)]

        return tuple(results), gradient

    return list(collective(*tensors))


def _later_rows(shape: Any) -> Any:
    return shape if shape.rank is None else tf.TensorShape([None, *(shape[1:] if shape.rank else ())])
