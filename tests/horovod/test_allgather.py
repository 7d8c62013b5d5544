"""allgather: equal and different numbers of rows, every dtype; asynchronous, out of order, empty, 0-dim."""

from __future__ import annotations

import itertools
import random
import sys

import cloudpickle
import torch

import spark_hvd.torch as hvd
from tests.horovod.support import DIMS, MOVABLE, LastingWorld, check, everyones, needs_gpus

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def test_equal_rows(three: LastingWorld) -> None:
    def fn() -> None:
        for dtype, dim in itertools.product(MOVABLE, DIMS):
            tensors = everyones(dtype, *[5] * dim)
            mine = tensors[hvd.rank()].clone()
            gathered = hvd.allgather(mine)
            check(gathered, torch.cat(tensors))
            assert torch.equal(mine, tensors[hvd.rank()])

    three.run(fn)


def test_other_rows_on_every_rank(three: LastingWorld) -> None:
    def fn() -> None:
        rank = hvd.rank()
        for dtype, dim in itertools.product(MOVABLE, DIMS):
            for counts in ([17, 32, 81], [0, 3, 1], [2, 0, 0], [0, 0, 0]):
                wholes = everyones(dtype, *[max(counts), *[3] * (dim - 1)])
                tensors = [whole[:count] for whole, count in zip(wholes, counts, strict=True)]
                check(hvd.allgather(tensors[rank]), torch.cat(tensors))

    three.run(fn)


def test_large_and_uneven(three: LastingWorld) -> None:
    def fn() -> None:
        counts = [1, 400_000, 3]
        gathered = hvd.allgather(torch.full((counts[hvd.rank()], 2), float(hvd.rank())))
        assert gathered.shape == (400_004, 2)
        assert [part.unique().tolist() for part in gathered.split(counts)] == [[0.0], [1.0], [2.0]]

    three.run(fn)


def test_scalars_count_as_one_row(three: LastingWorld) -> None:
    def fn() -> None:
        assert hvd.allgather(torch.tensor(hvd.rank() * 1.5)).tolist() == [0.0, 1.5, 3.0]
        assert hvd.synchronize(hvd.allgather_async(torch.tensor(True), name="flag")).tolist() == [True] * 3
        # next to one-dimensional tensors
        mine = torch.tensor(7) if hvd.rank() == 1 else torch.full((2,), hvd.rank())
        assert hvd.allgather(mine, name="beside").tolist() == [0, 0, 7, 2, 2]

    three.run(fn)


def test_any_stride(three: LastingWorld) -> None:
    def fn() -> None:
        tensors = everyones(torch.int16, 4, 6)
        for view in (lambda t: t.t(), lambda t: t[::2, 1::2], lambda t: t[:, 0], lambda t: t[:1].expand(3, 6)):
            check(hvd.allgather(view(tensors[hvd.rank()])), torch.cat([view(tensor) for tensor in tensors]))

    three.run(fn)


def test_many_in_flight(three: LastingWorld) -> None:
    def fn() -> None:
        in_flight = []
        for number, (dtype, dim) in enumerate(itertools.product(MOVABLE, DIMS)):
            tensors = everyones(dtype, *[7] * dim, seed=number)
            in_flight.append((hvd.allgather_async(tensors[hvd.rank()]), torch.cat(tensors)))
        for handle, expected in in_flight:
            check(hvd.synchronize(handle), expected)
            assert hvd.poll(handle)

    three.run(fn)


def test_not_done_before_all_have_called(three: LastingWorld) -> None:
    def fn() -> None:
        mine = torch.tensor([hvd.rank()])
        handle = None
        if hvd.rank() == 2:
            handle = hvd.allgather_async(mine, name="early")
            assert not hvd.poll(handle)
        hvd.barrier()
        if handle is None:
            handle = hvd.allgather_async(mine, name="early")
        assert hvd.synchronize(handle).tolist() == [0, 1, 2]

    three.run(fn)


def test_another_order_on_every_rank(three: LastingWorld) -> None:
    def fn() -> None:
        shuffle = random.Random(hvd.rank()).shuffle
        for step in range(3):
            order = list(range(40))
            shuffle(order)
            handles = {}
            for number in order:
                rows = (number + hvd.rank() + step) % 4  # different shapes under the same name in every step
                handles[number] = hvd.allgather_async(torch.full((rows, 2), number), name=f"rows{number}")
            for number in reversed(range(40)):
                total = sum((number + rank + step) % 4 for rank in range(3))
                assert hvd.synchronize(handles[number]).tolist() == [[number, number]] * total

    three.run(fn)


@needs_gpus(1)
def test_gpu(gpus: LastingWorld) -> None:
    def fn() -> None:
        device = torch.device("cuda", hvd.local_rank())
        for dtype, dim in itertools.product(MOVABLE, DIMS):
            wholes = everyones(dtype, *[5] * dim)
            tensors = [whole[: rank + 1] for rank, whole in enumerate(wholes)]
            gathered = hvd.allgather(tensors[hvd.rank()].to(device))
            assert gathered.device == device
            check(gathered.cpu(), torch.cat(tensors))

    gpus.run(fn)
