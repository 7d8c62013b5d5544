"""What the ports of Horovod's tests share: long-lived worlds, sample tensors, expected reductions, process sets."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

import spark_hvd.torch as hvd
from tests.ranks import LastingWorld

SECONDS = 90.0
"""Seconds until a collective fails that some rank never joined."""

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
REDUCIBLE = [*INTEGERS, *FLOATS]
MOVABLE = [*INTEGERS, *FLOATS, torch.bool, torch.complex64]
DIMS = (1, 3)
"""Numbers of dimensions. What is above one makes no difference; 0 does, where a call takes it."""
OPS = [hvd.Sum, hvd.Average, hvd.Min, hvd.Max, hvd.Product]

_TOLERANCES = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 1e-5, torch.float64: 1e-12}

ROUNDING = {torch.float16: 0.3, torch.bfloat16: 0.3, torch.float32: 1e-5, torch.float64: 1e-13}
"""Allowed error of a scaled sum of a few numbers up to 50, even if the numbers nearly cancel out."""


@contextlib.contextmanager
def lasting(size: int) -> Iterator[LastingWorld]:
    """A LastingWorld for the duration of a with statement."""
    world = LastingWorld(size, timeout=SECONDS)
    try:
        yield world
    finally:
        world.close()


def needs_gpus(count: int) -> Callable[[Any], Any]:
    """Mark a test as one for machines with this many GPUs."""
    missing = torch.cuda.device_count() < count

    def mark(test: Any) -> Any:
        return pytest.mark.gpu(pytest.mark.skipif(missing, reason=f"needs {count} CUDA devices")(test))

    return mark


def everyones(dtype: torch.dtype, *shape: int, most: int = 30, seed: int = 1234) -> list[torch.Tensor]:
    """Return the tensors of all ranks, known to each: random whole numbers from -most (0 if unsigned) to most."""
    generator = torch.Generator().manual_seed(seed)
    least = 0 if dtype in (torch.uint8, torch.bool) else -most
    values = torch.randint(least, most + 1, (hvd.size(), *shape), generator=generator)
    return [(rank_values % 2 == 0) if dtype == torch.bool else rank_values.to(dtype) for rank_values in values]


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same numbers in a dtype in which small ones can be computed exactly."""
    return tensor.to(torch.complex128 if tensor.dtype.is_complex else torch.float64)


def reduced(tensors: Sequence[torch.Tensor], op: Any) -> torch.Tensor:
    """Return the reduction of these tensors by definition."""
    stack = torch.stack([wide(tensor) for tensor in tensors])
    results: dict[Any, Callable[[], torch.Tensor]] = {
        hvd.Sum: lambda: stack.sum(0),
        hvd.Average: lambda: stack.sum(0) / len(tensors),
        hvd.Min: lambda: stack.amin(0),
        hvd.Max: lambda: stack.amax(0),
        hvd.Product: lambda: stack.prod(0),
    }
    return narrowed(results[op](), tensors[0].dtype)


def narrowed(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return wide values in a narrower dtype: integers by truncation toward zero."""
    if dtype == torch.bool:
        return values != 0
    return (values if dtype.is_floating_point or dtype.is_complex else values.trunc()).to(dtype)


def check(result: torch.Tensor, expected: torch.Tensor, slack: float = 0.0) -> None:
    """Check for the same dtype, shape and numbers: exact if whole, otherwise to the precision of the dtype.

    Args:
        result: The result of a collective.
        expected: The expected result.
        slack: An absolute error to allow besides.
    """
    assert result.dtype == expected.dtype
    assert result.shape == expected.shape
    tolerance = _TOLERANCES.get(result.dtype, 1e-5 if result.dtype.is_complex else 0.0)
    torch.testing.assert_close(wide(result), wide(expected), rtol=tolerance, atol=slack)


def rows_of_rank(rows: int, size: int, rank: int) -> slice:
    """Return which rows of a reducescatter are a rank's: the first rows % size ranks get one more."""
    counts = [rows // size + (other < rows % size) for other in range(size)]
    return slice(sum(counts[:rank]), sum(counts[: rank + 1]))


@contextlib.contextmanager
def halves() -> Iterator[Any]:
    """Make two process sets, of the even ranks and of the odd ones; return the one that includes this rank."""
    even = hvd.add_process_set(list(range(0, hvd.size(), 2)))
    odd = hvd.add_process_set(list(range(1, hvd.size(), 2)))
    yield odd if hvd.rank() % 2 else even
    assert hvd.remove_process_set(odd)
    assert hvd.remove_process_set(even)


def same_everywhere(value: Any) -> Any:
    """Assert that all ranks have the same value, and return it."""
    values = hvd.allgather_object(value)
    assert values == [value] * hvd.size()
    return value


def alive(tag: float = 1.0) -> None:
    """Assert that the world still works."""
    total = hvd.allreduce(torch.tensor([tag + hvd.rank()]), op=hvd.Sum)
    assert total.item() == math.fsum(tag + rank for rank in range(hvd.size()))
