"""join: a rank without more data lets the others continue, and learns which rank joined last."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable

import cloudpickle
import pytest
import torch

import spark_hvd.torch as hvd
from tests.horovod.support import OPS, LastingWorld, alive, check, everyones, narrowed, needs_gpus, reduced, wide

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def both(first: torch.Tensor, second: torch.Tensor, op: object) -> list[torch.Tensor]:
    """Start two allreduces at once, under the same names every time."""
    handles = [hvd.allreduce_async(first, name="a", op=op), hvd.allreduce_async(second, name="b", op=op)]
    return [hvd.synchronize(handle) for handle in handles]


def joined_together(first: int) -> None:
    """Join; all ranks must get the same rank, and not the one that joined first."""
    last = hvd.join()
    assert last in range(hvd.size())
    assert last != first
    assert hvd.allgather_object(last) == [last] * hvd.size()


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name.lower())
def test_allreduce(three: LastingWorld, op: object) -> None:
    def fn() -> None:
        rank, size = hvd.rank(), hvd.size()
        dtypes = (torch.int32, torch.int64, torch.float32, torch.float64)
        for number, (dtype, first) in enumerate(itertools.product(dtypes, range(size))):
            before, dim = number % 2 == 0, (1, 3)[number // 2 % 2]
            # values above zero and below: a zero for the joined rank would show in Min, Max and Product
            sign = -1 if first == 1 else 1
            a = [sign * (tensor.abs() + 1) for tensor in everyones(dtype, *[5] * dim, most=3)]
            b = [sign * (tensor.abs() + 1) for tensor in everyones(dtype, *[7] * dim, most=3, seed=5)]
            if before:
                for result, tensors in zip(both(a[rank], b[rank], op), (a, b), strict=True):
                    check(result, reduced(tensors, op))
            if rank != first:
                for result, tensors in zip(both(a[rank], b[rank], op), (a, b), strict=True):
                    check(result, reduced([tensors[other] for other in range(size) if other != first], op))
            joined_together(first)

    three.run(fn)


def test_average_that_counts_the_joined(three: LastingWorld) -> None:
    def fn() -> None:
        rank, size = hvd.rank(), hvd.size()
        for dtype, first in itertools.product((torch.int32, torch.float64), range(size)):
            tensors = everyones(dtype, 5)
            if rank != first:
                averaged = hvd.allreduce(tensors[rank])
                others = [tensors[other] for other in range(size) if other != first]
                check(averaged, narrowed(torch.stack([wide(tensor) for tensor in others]).sum(0) / size, dtype))
            last = hvd.join(count_in_average=rank == first)
            assert last != first
        # one that counts and one that does not
        if rank == 2:
            assert hvd.allreduce(torch.tensor([6.0])).tolist() == [3.0]
            assert hvd.allreduce(torch.tensor([6.0]), op=hvd.Sum).tolist() == [6.0]
        assert hvd.join(count_in_average=rank == 0) == 2

    three.run(fn)


def test_last_is_who_joined_last(three: LastingWorld) -> None:
    def fn(order: list[int]) -> None:
        # Rank order[0] joins at once; each call of the others ends only when all before them have joined.
        place = order.index(hvd.rank())
        for step in range(1, place + 1):
            values = torch.tensor([1.0 + hvd.rank()])
            expected = sum(1.0 + other for other in order[step:])
            assert hvd.allreduce(values, op=hvd.Sum, name=f"step{step}").tolist() == [expected]
        assert hvd.join() == order[-1]
        alive()

    for order in itertools.permutations(range(3)):
        three.run(fn, list(order))


def test_uneven_data(three: LastingWorld) -> None:
    def fn() -> None:
        rank, size = hvd.rank(), hvd.size()
        for most in (1, 4):
            for step in range(most * (rank + 1)):
                here = [other for other in range(size) if most * (other + 1) > step]
                averaged = hvd.allreduce(torch.full((3,), float(10 * rank + step)))
                expected = sum(10 * other + step for other in here) / len(here)
                torch.testing.assert_close(averaged, torch.full((3,), expected))
            assert hvd.join() == 2
            assert hvd.allreduce(torch.tensor([float(rank)])).tolist() == [1.0]

    three.run(fn)


def test_everyone_at_once(three: LastingWorld) -> None:
    def fn() -> list[int]:
        return [hvd.join() for _ in range(5)]

    zero, one, two = three.run(fn)
    assert zero == one == two
    assert all(last in range(3) for last in zero)


def test_other_forms_of_allreduce(three: LastingWorld) -> None:
    def fn() -> None:
        rank = hvd.rank()
        for first in range(3):
            if rank != first:
                others = sum(other + 1.0 for other in range(3) if other != first)
                in_place = torch.full((4,), rank + 1.0)
                assert hvd.allreduce_(in_place, op=hvd.Sum) is in_place
                assert in_place.tolist() == [others] * 4
                scaled = hvd.allreduce(torch.full((4,), rank + 1.0), prescale_factor=2.0, postscale_factor=4.0)
                assert scaled.tolist() == [others * 4] * 4
                group = [torch.full((2,), rank + 1.0), torch.tensor([rank + 1]), torch.tensor(rank + 1.0).double()]
                for grouped in (
                    hvd.grouped_allreduce(group, op=hvd.Sum),
                    hvd.synchronize(hvd.grouped_allreduce_async_(group, op=hvd.Sum)),
                ):
                    assert [tensor.tolist() for tensor in grouped] == [[others] * 2, [others], others]
            joined_together(first)

    three.run(fn)


def test_allgather(three: LastingWorld) -> None:
    def fn() -> None:
        rank = hvd.rank()
        for first in range(3):
            if rank != first:
                others = [other for other in range(3) if other != first]
                gathered = hvd.allgather(torch.full((rank + 1, 2), rank))
                assert gathered.tolist() == [[other, other] for other in others for _ in range(other + 1)]
                assert hvd.allgather(torch.tensor(rank)).tolist() == others
                group = hvd.grouped_allgather([torch.tensor([rank]), torch.full((2, 1), rank)])
                assert group[0].tolist() == others
                assert group[1].tolist() == [[other] for other in others for _ in range(2)]
            joined_together(first)

    three.run(fn)


def test_broadcast(three: LastingWorld) -> None:
    def fn() -> None:
        rank = hvd.rank()
        for first in range(3):
            if rank != first:
                with pytest.raises(hvd.MismatchError, match=rf"(?i)join.*\b{first}\b|\b{first}\b.*join"):
                    hvd.broadcast(torch.ones(3), first, name="weights")
                root = (first + 1) % 3
                assert hvd.broadcast(torch.full((3,), rank), root, name="weights").tolist() == [root] * 3
            joined_together(first)

    three.run(fn)


CALLS: list[Callable[[], object]] = [
    lambda: hvd.alltoall(torch.ones(3), name="op"),
    lambda: hvd.alltoall(torch.ones(3), [1, 1, 1], name="op"),
    lambda: hvd.reducescatter(torch.ones(3), name="op"),
    lambda: hvd.grouped_reducescatter([torch.ones(3), torch.ones(3)], name="op"),
]


def test_what_needs_every_rank(three: LastingWorld) -> None:
    def fn() -> None:
        rank = hvd.rank()
        for first, call in itertools.product(range(3), CALLS):
            if rank != first:
                with pytest.raises(hvd.MismatchError, match=rf"(?i)join.*\b{first}\b|\b{first}\b.*join"):
                    call()
                total = hvd.allreduce(torch.tensor([1.0]), op=hvd.Sum, name="op")
                assert total.tolist() == [2.0]
            joined_together(first)

    three.run(fn)


def test_two_joined(three: LastingWorld) -> None:
    def fn() -> None:
        if hvd.rank() == 1:
            with pytest.raises(hvd.MismatchError, match=r"0.*2"):
                hvd.reducescatter(torch.ones(3))
            assert hvd.allreduce(torch.tensor([5, -5]), op=hvd.Average).tolist() == [5, -5]
            assert hvd.allreduce(torch.tensor([5.0]), op=hvd.Product).tolist() == [5.0]
            assert hvd.allgather(torch.tensor([[1, 2]])).tolist() == [[1, 2]]
        assert hvd.join() == 1
        alive()

    three.run(fn)


def test_what_was_in_flight_before(three: LastingWorld) -> None:
    def fn() -> None:
        handles = [hvd.allreduce_async(torch.full((2,), 1.0 + n), op=hvd.Sum, name=f"before{n}") for n in range(20)]
        assert hvd.join() in range(3)
        assert [hvd.synchronize(handle)[0].item() for handle in handles] == [3.0 + 3 * n for n in range(20)]

    three.run(fn)


@needs_gpus(2)
def test_gpu(two: LastingWorld) -> None:
    def fn() -> None:
        rank, device = hvd.rank(), hvd.local_rank()
        for first in range(2):
            if rank != first:
                mine = torch.tensor([3.0, -1.0], device=f"cuda:{device}")
                for op in OPS:
                    assert hvd.allreduce(mine, op=op).tolist() == [3.0, -1.0]
            assert hvd.join(device) == 1 - first
            assert hvd.allgather_object(rank) == [0, 1]

    two.run(fn)
