"""reducescatter: every dtype, number of dimensions and rows; scaled, asynchronous, out of order; what it refuses."""

from __future__ import annotations

import itertools
import random
import sys
from typing import Any

import cloudpickle
import pytest
import torch

import spark_hvd.torch as hvd
from tests.horovod.support import (
    DIMS,
    FLOATS,
    INTEGERS,
    OPS,
    REDUCIBLE,
    ROUNDING,
    LastingWorld,
    alive,
    check,
    everyones,
    narrowed,
    needs_gpus,
    reduced,
    rows_of_rank,
    wide,
)

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name.lower())
def test_every_dtype_and_dimension(three: LastingWorld, op: Any) -> None:
    def fn() -> None:
        size, rank = hvd.size(), hvd.rank()
        for dtype, dim in itertools.product(REDUCIBLE, DIMS):
            tensors = everyones(dtype, *[2 * size] * dim, most=3)
            mine = tensors[rank].clone()
            check(hvd.reducescatter(mine, op=op), reduced(tensors, op)[rows_of_rank(2 * size, size, rank)])
            assert torch.equal(mine, tensors[rank])

    three.run(fn)


def test_average_is_the_default(three: LastingWorld) -> None:
    def fn() -> None:
        share = hvd.reducescatter(torch.arange(3.0) * (hvd.rank() + 1))
        assert share.tolist() == [2.0 * hvd.rank()]
        share = hvd.synchronize(hvd.reducescatter_async(torch.arange(3.0) * (hvd.rank() + 1)))
        assert share.tolist() == [2.0 * hvd.rank()]

    three.run(fn)


def test_any_number_of_rows(three: LastingWorld) -> None:
    def fn() -> None:
        size, rank = hvd.size(), hvd.rank()
        for rows in (0, 1, 2, size, size + 1, 2 * size + 2):
            tensors = everyones(torch.float32, rows, 2)
            share = hvd.reducescatter(tensors[rank], op=hvd.Sum)
            check(share, reduced(tensors, hvd.Sum)[rows_of_rank(rows, size, rank)])
        tensors = [tensor.t() for tensor in everyones(torch.float32, 2, 6)]
        check(hvd.reducescatter(tensors[rank], op=hvd.Sum), reduced(tensors, hvd.Sum)[rows_of_rank(6, size, rank)])

    three.run(fn)


@pytest.mark.parametrize("where", ["prescale_factor", "postscale_factor"])
def test_scales(three: LastingWorld, where: str) -> None:
    def fn() -> None:
        size, rank = hvd.size(), hvd.rank()
        share = rows_of_rank(2 * size, size, rank)
        for dtype, dim, factor in itertools.product([*INTEGERS, *FLOATS], (1, 2), (0.375, 1.7)):
            tensors = everyones(dtype, *[2 * size] * dim, most=10)
            result = hvd.reducescatter(tensors[rank], op=hvd.Sum, **{where: factor})
            if where == "prescale_factor":
                expected = reduced([narrowed(wide(tensor) * factor, dtype) for tensor in tensors], hvd.Sum)
            else:
                expected = narrowed(wide(reduced(tensors, hvd.Sum)) * factor, dtype)
            check(result, expected[share], slack=ROUNDING.get(dtype, 0.0))

    three.run(fn)


def test_many_in_flight(three: LastingWorld) -> None:
    def fn() -> None:
        size, rank = hvd.size(), hvd.rank()
        in_flight = []
        for number, (dtype, dim) in enumerate(itertools.product(REDUCIBLE, DIMS)):
            tensors = everyones(dtype, *[2 * size] * dim, seed=number)
            expected = reduced(tensors, hvd.Sum)[rows_of_rank(2 * size, size, rank)]
            in_flight.append((hvd.reducescatter_async(tensors[rank], op=hvd.Sum), expected))
        for handle, expected in in_flight:
            check(hvd.synchronize(handle), expected)

    three.run(fn)


def test_not_done_before_all_have_called(three: LastingWorld) -> None:
    def fn() -> None:
        mine = torch.ones(3)
        handle = None
        if hvd.rank() == 1:
            handle = hvd.reducescatter_async(mine, op=hvd.Sum, name="early")
            assert not hvd.poll(handle)
        hvd.barrier()
        if handle is None:
            handle = hvd.reducescatter_async(mine, op=hvd.Sum, name="early")
        assert hvd.synchronize(handle).tolist() == [3.0]

    three.run(fn)


def test_another_order_on_every_rank(three: LastingWorld) -> None:
    def fn() -> None:
        size, rank = hvd.size(), hvd.rank()
        shuffle = random.Random(rank).shuffle
        for step in range(3):
            order = list(range(30))
            shuffle(order)
            handles = {
                number: hvd.reducescatter_async(
                    torch.full((number % 5 + 1, 2), float(number + rank)), op=hvd.Sum, name=f"shard{number}"
                )
                for number in order
            }
            for number in reversed(range(30)):
                share = rows_of_rank(number % 5 + 1, size, rank)
                expected = [[3.0 * number + 3] * 2] * (share.stop - share.start)
                assert hvd.synchronize(handles[number]).tolist() == expected, step

    three.run(fn)


def test_what_it_refuses(three: LastingWorld) -> None:
    def fn() -> None:
        for call in (hvd.reducescatter, hvd.reducescatter_async):
            with pytest.raises(ValueError, match="0-dim"):
                call(torch.tensor(1.0))
            with pytest.raises(NotImplementedError, match=r"(?i)adasum"):
                call(torch.ones(12), op=hvd.Adasum)
        alive()

    three.run(fn)


@needs_gpus(1)
def test_gpu(gpus: LastingWorld) -> None:
    def fn() -> None:
        size, rank = hvd.size(), hvd.rank()
        device = torch.device("cuda", hvd.local_rank())
        for dtype, dim, rows in itertools.product((torch.int64, *FLOATS), (1, 2), (1, 2 * size, 2 * size + 1)):
            tensors = everyones(dtype, rows, *[2] * (dim - 1))
            share = hvd.reducescatter(tensors[rank].to(device), op=hvd.Sum)
            assert share.device == device
            check(share.cpu(), reduced(tensors, hvd.Sum)[rows_of_rank(rows, size, rank)])

    gpus.run(fn)
