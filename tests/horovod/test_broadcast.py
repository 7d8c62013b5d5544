"""broadcast: every dtype, number of dimensions and root; in place, asynchronous, out of order."""

from __future__ import annotations

import itertools
import random
import sys

import cloudpickle
import pytest
import torch

import spark_hvd.torch as hvd
from tests.horovod.support import DIMS, MOVABLE, LastingWorld, alive, check, everyones, needs_gpus

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def test_every_root(three: LastingWorld) -> None:
    def fn() -> None:
        for dtype, dim, root in itertools.product(MOVABLE, (0, *DIMS), range(hvd.size())):
            tensors = everyones(dtype, *[5] * dim)
            mine = tensors[hvd.rank()].clone()
            result = hvd.broadcast(mine, root)
            check(result, tensors[root])
            assert result is not mine
            assert torch.equal(mine, tensors[hvd.rank()])

    three.run(fn)


def test_in_place(three: LastingWorld) -> None:
    def fn() -> None:
        for dtype, dim, root in itertools.product(MOVABLE, (0, *DIMS), range(hvd.size())):
            tensors = everyones(dtype, *[5] * dim)
            mine = tensors[hvd.rank()].clone()
            assert hvd.broadcast_(mine, root) is mine
            check(mine, tensors[root])
            mine = tensors[hvd.rank()].clone()
            assert hvd.synchronize(hvd.broadcast_async_(mine, root, name="in place")) is mine
            check(mine, tensors[root])

    three.run(fn)


def test_any_stride(three: LastingWorld) -> None:
    def fn() -> None:
        tensors = everyones(torch.float32, 4, 6)
        for view in (lambda t: t.t(), lambda t: t[::2, 1::2], lambda t: t[:, 0], lambda t: t[1:1]):
            whole = tensors[hvd.rank()].clone()
            check(hvd.broadcast(view(whole), 1), view(tensors[1]))
            assert torch.equal(whole, tensors[hvd.rank()])
            hvd.broadcast_(view(whole), 1)
            check(view(whole), view(tensors[1]))
            inside = torch.zeros_like(whole, dtype=torch.bool)
            view(inside).fill_(True)
            assert torch.equal(whole[~inside], tensors[hvd.rank()][~inside])

    three.run(fn)


def test_many_in_flight(three: LastingWorld) -> None:
    def fn() -> None:
        in_flight = []
        for number, (dtype, dim) in enumerate(itertools.product(MOVABLE, DIMS)):
            tensors = everyones(dtype, *[7] * dim, seed=number)
            root = number % hvd.size()
            in_flight.append((hvd.broadcast_async(tensors[hvd.rank()], root), tensors[root]))
        for handle, expected in reversed(in_flight):
            check(hvd.synchronize(handle), expected)

    three.run(fn)


def test_not_done_before_the_root_has_called(three: LastingWorld) -> None:
    def fn() -> None:
        mine = torch.tensor([hvd.rank()])
        handle = None
        if hvd.rank() != 1:
            handle = hvd.broadcast_async(mine, 1, name="early")
            assert not hvd.poll(handle)
        hvd.barrier()
        if handle is None:
            handle = hvd.broadcast_async(mine, 1, name="early")
        assert hvd.synchronize(handle).tolist() == [1]

    three.run(fn)


def test_another_order_on_every_rank(three: LastingWorld) -> None:
    def fn() -> None:
        shuffle = random.Random(hvd.rank()).shuffle
        for step in range(3):
            order = list(range(40))
            shuffle(order)
            handles = {
                number: hvd.broadcast_async_(
                    torch.full((number % 7,), 100 * number + hvd.rank()), (number + step) % 3, name=f"weight{number}"
                )
                for number in order
            }
            for number in reversed(range(40)):
                expected = 100 * number + (number + step) % 3
                assert hvd.synchronize(handles[number]).tolist() == [expected] * (number % 7)

    three.run(fn)


def test_no_such_root(three: LastingWorld) -> None:
    def fn() -> None:
        for root in (-1, 3):
            for call in (hvd.broadcast, hvd.broadcast_, hvd.broadcast_async, hvd.broadcast_async_):
                with pytest.raises(ValueError, match=f"root_rank={root}"):
                    call(torch.ones(2), root)
        alive()

    three.run(fn)


@needs_gpus(1)
def test_gpu(gpus: LastingWorld) -> None:
    def fn() -> None:
        device = torch.device("cuda", hvd.local_rank())
        for dtype, dim, root in itertools.product(MOVABLE, DIMS, range(hvd.size())):
            tensors = everyones(dtype, *[5] * dim)
            result = hvd.broadcast(tensors[hvd.rank()].to(device), root)
            assert result.device == device
            check(result.cpu(), tensors[root])

    gpus.run(fn)
