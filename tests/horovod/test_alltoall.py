"""alltoall: equal and unequal splits, every dtype; asynchronous, out of order; splits that do not match."""

from __future__ import annotations

import itertools
import random
import sys

import cloudpickle
import pytest
import torch

import spark_hvd.torch as hvd
from tests.horovod.support import DIMS, MOVABLE, LastingWorld, alive, check, everyones, needs_gpus, same_everywhere

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def exchanged(tensors: list[torch.Tensor], splits: list[list[int]]) -> torch.Tensor:
    """Return what this rank receives when rank r sends splits[r][i] rows of tensors[r] to rank i."""
    parts = [tensor.split(counts)[hvd.rank()] for tensor, counts in zip(tensors, splits, strict=True)]
    return torch.cat(parts)


def test_given_splits(three: LastingWorld) -> None:
    def fn() -> None:
        size, rank = hvd.size(), hvd.rank()
        for dtype, dim in itertools.product(MOVABLE, DIMS):
            splits = [[sender + 1] * size for sender in range(size)]
            wholes = everyones(dtype, size * size, *[2] * (dim - 1))
            tensors = [whole[: sum(counts)] for whole, counts in zip(wholes, splits, strict=True)]
            given = torch.tensor(splits[rank], dtype=torch.int32)
            received, counts = hvd.alltoall(tensors[rank], given)
            check(received, exchanged(tensors, splits))
            assert counts.dtype == torch.int32
            assert counts.tolist() == [sender + 1 for sender in range(size)]

    three.run(fn)


def test_any_splits(three: LastingWorld) -> None:
    def fn() -> None:
        rank = hvd.rank()
        for splits in (
            [[0, 3, 1], [2, 0, 2], [1, 1, 0]],
            [[0, 0, 0], [0, 0, 5], [0, 0, 0]],
            [[0, 0, 0]] * 3,
            [[4, 0, 0], [0, 4, 0], [0, 0, 4]],
        ):
            wholes = everyones(torch.float32, 9, 2)
            tensors = [whole[: sum(counts)] for whole, counts in zip(wholes, splits, strict=True)]
            for given in (splits[rank], tuple(splits[rank]), torch.tensor(splits[rank])):
                received, counts = hvd.alltoall(tensors[rank], splits=given)
                check(received, exchanged(tensors, splits))
                assert counts.tolist() == [sender[rank] for sender in splits]

    three.run(fn)


def test_equal_shares(three: LastingWorld) -> None:
    def fn() -> None:
        size, rank = hvd.size(), hvd.rank()
        for dtype, dim in itertools.product(MOVABLE, DIMS):
            splits = [[sender + 1] * size for sender in range(size)]
            wholes = everyones(dtype, size * size, *[2] * (dim - 1))
            tensors = [whole[: sum(counts)] for whole, counts in zip(wholes, splits, strict=True)]
            received = hvd.alltoall(tensors[rank])
            assert isinstance(received, torch.Tensor)
            check(received, exchanged(tensors, splits))

    three.run(fn)


def test_asynchronous_results_are_pairs(three: LastingWorld) -> None:
    def fn() -> None:
        rank, size = hvd.rank(), hvd.size()
        mine = torch.arange(2 * size) + 100 * rank
        for options in ({}, {"splits": [2] * size}):
            received, counts = hvd.synchronize(hvd.alltoall_async(mine, **options))
            assert received.tolist() == [100 * other + 2 * rank + k for other in range(size) for k in range(2)]
            assert counts.dtype == torch.int32
            assert counts.tolist() == [2] * size

    three.run(fn)


def test_any_stride(three: LastingWorld) -> None:
    def fn() -> None:
        tensors = [tensor.t() for tensor in everyones(torch.float32, 2, 6)]
        check(hvd.alltoall(tensors[hvd.rank()]), exchanged(tensors, [[2] * 3] * 3))
        assert hvd.alltoall(torch.empty(3, 0)).shape == (3, 0)

    three.run(fn)


def test_another_order_on_every_rank(three: LastingWorld) -> None:
    def fn() -> None:
        rank, size = hvd.rank(), hvd.size()
        shuffle = random.Random(rank).shuffle
        for step in range(3):
            order = list(range(30))
            shuffle(order)
            handles = {}
            for number in order:
                splits = [(number + rank + other + step) % 3 for other in range(size)]
                mine = torch.full((sum(splits),), 100 * number + rank)
                handles[number] = hvd.alltoall_async(mine, splits, name=f"tokens{number}")
            for number in reversed(range(30)):
                received, counts = hvd.synchronize(handles[number])
                sent = [(number + other + rank + step) % 3 for other in range(size)]
                assert counts.tolist() == sent
                assert received.tolist() == [100 * number + other for other in range(size) for _ in range(sent[other])]

    three.run(fn)


def test_splits_that_do_not_fit(three: LastingWorld) -> None:
    def fn() -> None:
        size = hvd.size()
        with pytest.raises(ValueError, match="divided"):
            hvd.alltoall(torch.ones(size + 1))
        with pytest.raises(ValueError, match="first dimension"):
            hvd.alltoall(torch.ones(size - 1), torch.ones(size, dtype=torch.int32))
        for splits, text in (([1] * (size + 1), "one number for each rank"), ([size + 1, -1, 0], "negative")):
            with pytest.raises(ValueError, match=text):
                hvd.alltoall(torch.ones(size), splits)
        with pytest.raises((TypeError, ValueError), match="splits"):
            hvd.alltoall(torch.ones(size), torch.ones(size))  # floating-point splits
        with pytest.raises(ValueError, match="0-dim"):
            hvd.alltoall(torch.tensor(1.0))
        alive()

    three.run(fn)


def test_splits_of_one_rank_do_not_fit(three: LastingWorld) -> None:
    def fn() -> None:
        wrong = [2, 1, 1] if hvd.rank() == 1 else [1, 1, 1]
        with pytest.raises(hvd.MismatchError, match="rank 1") as caught:
            hvd.alltoall(torch.ones(3), wrong, name="tokens")
        same_everywhere(str(caught.value))
        assert hvd.alltoall(torch.ones(3), [1, 1, 1], name="tokens")[0].tolist() == [1.0] * 3

    three.run(fn)


@needs_gpus(1)
def test_gpu(gpus: LastingWorld) -> None:
    def fn() -> None:
        size, rank = hvd.size(), hvd.rank()
        device = torch.device("cuda", hvd.local_rank())
        for dtype, dim, where in itertools.product(MOVABLE, DIMS, ("cpu", device)):
            splits = [[sender + 1] * size for sender in range(size)]
            wholes = everyones(dtype, size * size, *[2] * (dim - 1))
            tensors = [whole[: sum(counts)] for whole, counts in zip(wholes, splits, strict=True)]
            given = torch.tensor(splits[rank], dtype=torch.int32, device=where)
            received, counts = hvd.alltoall(tensors[rank].to(device), given)
            check(received.cpu(), exchanged(tensors, splits))
            assert received.device == device
            assert counts.device.type == given.device.type
            assert counts.tolist() == [sender + 1 for sender in range(size)]

    gpus.run(fn)
