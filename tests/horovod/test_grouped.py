"""Grouped allreduce, allgather and reducescatter: lists of tensors that are sent as one."""

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
    MOVABLE,
    OPS,
    REDUCIBLE,
    LastingWorld,
    check,
    everyones,
    narrowed,
    needs_gpus,
    reduced,
    rows_of_rank,
    wide,
)

cloudpickle.register_pickle_by_value(sys.modules[__name__])

MEMBERS = 5


def groups(dtype: torch.dtype, *shape: int, most: int = 30) -> list[list[torch.Tensor]]:
    """Return five tensors of every rank: groups[member][rank]."""
    return [everyones(dtype, *shape, most=most, seed=member) for member in range(MEMBERS)]


def mine_of(group: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    return [member[hvd.rank()].clone() for member in group]


def test_allreduce(three: LastingWorld) -> None:
    def fn() -> None:
        for dtype, dim, op in itertools.product(REDUCIBLE, DIMS, OPS):
            group = groups(dtype, *[5] * dim, most=3)
            results = hvd.grouped_allreduce(mine_of(group), op=op)
            assert isinstance(results, list)
            for result, member in zip(results, group, strict=True):
                check(result, reduced(member, op))

    three.run(fn)


def test_allreduce_of_mixed_dtypes_and_shapes(three: LastingWorld) -> None:
    def fn() -> None:
        group = [everyones(dtype, *[3] * (number % 4), seed=number) for number, dtype in enumerate(REDUCIBLE)]
        group.append([torch.empty(0, 4)] * hvd.size())
        group.append([tensor.t() for tensor in everyones(torch.float32, 4, 2)])
        mine = mine_of(group)
        for result, member in zip(hvd.grouped_allreduce(mine, op=hvd.Sum), group, strict=True):
            check(result, reduced(member, hvd.Sum))
        for tensor, member in zip(mine, group, strict=True):
            assert torch.equal(tensor, member[hvd.rank()])
        assert hvd.grouped_allreduce([]) == []

    three.run(fn)


def test_allreduce_in_place(three: LastingWorld) -> None:
    def fn() -> None:
        for dtype, dim in itertools.product(REDUCIBLE, DIMS):
            group = groups(dtype, *[5] * dim)
            for asynchronous in (False, True):
                mine = mine_of(group)
                if asynchronous:
                    results = hvd.synchronize(hvd.grouped_allreduce_async_(mine, op=hvd.Sum, name="in place"))
                else:
                    results = hvd.grouped_allreduce_(mine, op=hvd.Sum)
                assert all(result is tensor for result, tensor in zip(results, mine, strict=True))
                for tensor, member in zip(mine, group, strict=True):
                    check(tensor, reduced(member, hvd.Sum))

    three.run(fn)


def test_allreduce_scales_and_compression(three: LastingWorld) -> None:
    def fn() -> None:
        for dtype in [*INTEGERS, *FLOATS]:
            group = groups(dtype, 5, most=10)
            before = hvd.grouped_allreduce(mine_of(group), op=hvd.Sum, prescale_factor=0.375)
            after = hvd.grouped_allreduce(mine_of(group), op=hvd.Sum, postscale_factor=0.375)
            for first, last, member in zip(before, after, group, strict=True):
                scaled = [narrowed(wide(tensor) * 0.375, dtype) for tensor in member]
                check(first, reduced(scaled, hvd.Sum), slack=0.1 if dtype == torch.bfloat16 else 0.0)
                check(last, narrowed(wide(reduced(member, hvd.Sum)) * 0.375, dtype))
        thirds = [torch.full((2,), 1 / 3), torch.full((3,), 2 / 3)]
        for result, third in zip(hvd.grouped_allreduce(thirds, compression=hvd.Compression.fp16), thirds, strict=True):
            assert torch.equal(result, third.half().float())

    three.run(fn)


def test_many_groups_in_another_order_on_every_rank(three: LastingWorld) -> None:
    def fn() -> None:
        order = list(range(20))
        random.Random(hvd.rank()).shuffle(order)
        handles = {}
        for number in order:
            group = [torch.full((member + 1,), float(number * member + hvd.rank())) for member in range(4)]
            handles[number] = hvd.grouped_allreduce_async(group, op=hvd.Sum, name=f"group{number}")
        for number in reversed(range(20)):
            results = hvd.synchronize(handles[number])
            assert isinstance(results, list)
            expected = [[3.0 * number * member + 3] * (member + 1) for member in range(4)]
            assert [tensor.tolist() for tensor in results] == expected

    three.run(fn)


def test_no_member_runs_before_all_are_ready(three: LastingWorld) -> None:
    def fn() -> None:
        group = [torch.tensor([1.0]), torch.tensor([2.0])]
        handle = None
        if hvd.rank() != 2:
            handle = hvd.grouped_allreduce_async(group, op=hvd.Sum, name="whole")
            assert not hvd.poll(handle)
        hvd.barrier()
        if handle is None:
            handle = hvd.grouped_allreduce_async(group, op=hvd.Sum, name="whole")
        assert [tensor.tolist() for tensor in handle.wait()] == [[3.0], [6.0]]

    three.run(fn)


def test_allgather(three: LastingWorld) -> None:
    def fn() -> None:
        for dtype, dim in itertools.product(MOVABLE, DIMS):
            group = groups(dtype, *[5] * dim)
            for result, member in zip(hvd.grouped_allgather(mine_of(group)), group, strict=True):
                check(result, torch.cat(member))

    three.run(fn)


def test_allgather_of_other_row_counts(three: LastingWorld) -> None:
    def fn() -> None:
        rank, size = hvd.rank(), hvd.size()
        group = [torch.full((rank * member, 2), rank) for member in range(4)]
        group.append(torch.tensor(True))
        handle = hvd.grouped_allgather_async(group, name="rows")
        results = hvd.synchronize(handle)
        assert isinstance(results, list)
        for member, result in enumerate(results[:-1]):
            assert result.tolist() == [[other, other] for other in range(size) for _ in range(other * member)]
        assert results[-1].tolist() == [True] * size

    three.run(fn)


@pytest.mark.parametrize("op", [hvd.Sum, hvd.Average], ids=["sum", "average"])
def test_reducescatter(three: LastingWorld, op: Any) -> None:
    def fn() -> None:
        size, rank = hvd.size(), hvd.rank()
        for dtype, dim in itertools.product(REDUCIBLE, DIMS):
            group = groups(dtype, *[2 * size] * dim)
            share = rows_of_rank(2 * size, size, rank)
            for result, member in zip(hvd.grouped_reducescatter(mine_of(group), op=op), group, strict=True):
                check(result, reduced(member, op)[share])

    three.run(fn)


def test_reducescatter_of_mixed_shapes(three: LastingWorld) -> None:
    def fn() -> None:
        size, rank = hvd.size(), hvd.rank()
        group = [everyones(torch.float32, rows, 2, seed=rows) for rows in (0, 1, size, 2 * size + 1)]
        group.append(everyones(torch.int64, 7))
        handle = hvd.grouped_reducescatter_async(mine_of(group), op=hvd.Sum, name="mixed")
        results = hvd.synchronize(handle)
        assert isinstance(results, list)
        for result, member in zip(results, group, strict=True):
            check(result, reduced(member, hvd.Sum)[rows_of_rank(len(member[0]), size, rank)])

    three.run(fn)


def test_reducescatter_scales(three: LastingWorld) -> None:
    def fn() -> None:
        size = hvd.size()
        share = rows_of_rank(2 * size, size, hvd.rank())
        for dtype in [*INTEGERS, *FLOATS]:
            group = groups(dtype, 2 * size, most=10)
            before = hvd.grouped_reducescatter(mine_of(group), op=hvd.Sum, prescale_factor=0.375)
            after = hvd.grouped_reducescatter(mine_of(group), op=hvd.Sum, postscale_factor=0.375)
            for first, last, member in zip(before, after, group, strict=True):
                scaled = [narrowed(wide(tensor) * 0.375, dtype) for tensor in member]
                check(first, reduced(scaled, hvd.Sum)[share], slack=0.1 if dtype == torch.bfloat16 else 0.0)
                check(last, narrowed(wide(reduced(member, hvd.Sum)) * 0.375, dtype)[share])

    three.run(fn)


def test_reducescatter_of_a_scalar(three: LastingWorld) -> None:
    def fn() -> None:
        with pytest.raises(ValueError, match="0-dim"):
            hvd.grouped_reducescatter([torch.zeros(3, 1), torch.tensor(1.0)])
        assert hvd.grouped_reducescatter([torch.ones(3)], op=hvd.Sum)[0].tolist() == [3.0]

    three.run(fn)


def test_no_lists(three: LastingWorld) -> None:
    def fn() -> None:
        for call in (
            hvd.grouped_allreduce,
            hvd.grouped_allreduce_async,
            hvd.grouped_allreduce_async_,
            hvd.grouped_allgather,
            hvd.grouped_allgather_async,
            hvd.grouped_reducescatter,
            hvd.grouped_reducescatter_async,
        ):
            with pytest.raises(TypeError, match="expected a"):
                call(torch.ones(2))
        assert hvd.synchronize(hvd.grouped_allreduce_async([])) == []

    three.run(fn)


@needs_gpus(1)
def test_cpu_and_gpu_in_one_group(gpus: LastingWorld) -> None:
    def fn() -> None:
        device = torch.device("cuda", hvd.local_rank())
        group = [torch.full((10,), float(n), device=device if n % 2 else "cpu") for n in range(MEMBERS)]
        results = hvd.grouped_allreduce(group, op=hvd.Sum)
        for number, (result, tensor) in enumerate(zip(results, group, strict=True)):
            assert result.device == tensor.device
            assert result.tolist() == [float(number * hvd.size())] * 10

    gpus.run(fn)
