"""Gradients through the collectives: of the sum of all ranks' losses, with each rank's own incoming gradients."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
import torch

import spark_hvd.torch as hvd
from tests.horovod.support import DIMS, LastingWorld, halves, needs_gpus, rows_of_rank

cloudpickle.register_pickle_by_value(sys.modules[__name__])

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def leaf(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.full(shape, 1.0 + hvd.rank(), dtype=dtype, requires_grad=True)


def incoming(result: torch.Tensor) -> torch.Tensor:
    """Return each rank's incoming gradient: its number, counted from one."""
    return torch.full_like(result, 1.0 + hvd.rank())


def check_gradient(mine: torch.Tensor, expected: Any) -> None:
    assert mine.grad is not None
    assert mine.grad.shape == mine.shape
    assert mine.grad.dtype == mine.dtype
    wanted = torch.as_tensor(expected, dtype=torch.float64, device=mine.device).expand(mine.shape)
    tolerance = {torch.float16: 2e-3, torch.bfloat16: 2e-2}.get(mine.dtype, 1e-6)
    torch.testing.assert_close(mine.grad.double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("op", "expected"), [(hvd.Sum, 6.0), (hvd.Average, 2.0)], ids=["sum", "average"])
def test_allreduce(three: LastingWorld, op: Any, expected: float) -> None:
    def fn() -> None:
        for dtype, dim in itertools.product(DTYPES, (0, *DIMS)):
            mine = leaf(dtype, *[5] * dim)
            result = hvd.allreduce(mine, op=op)
            assert result.requires_grad
            result.backward(incoming(result))
            check_gradient(mine, expected)
        # equal on all ranks, as in Horovod's tests: size times as much for Sum, the same for Average
        mine = leaf(torch.float32, 17)
        hvd.allreduce(mine, op=op).sum().backward()
        check_gradient(mine, expected / 2)

    three.run(fn)


def test_allreduce_with_scales(three: LastingWorld) -> None:
    def fn() -> None:
        for op, expected in ((hvd.Sum, 9.0), (hvd.Average, 3.0)):
            mine = leaf(torch.float64, 4)
            result = hvd.allreduce(mine, op=op, prescale_factor=0.5, postscale_factor=3.0)
            result.backward(incoming(result))
            check_gradient(mine, expected)

    three.run(fn)


def test_allreduce_with_compression(three: LastingWorld) -> None:
    def fn() -> None:
        mine = leaf(torch.float32, 4)
        result = hvd.allreduce(mine, op=hvd.Sum, compression=hvd.Compression.fp16)
        assert result.dtype == torch.float32
        result.backward(incoming(result))
        check_gradient(mine, 6.0)

    three.run(fn)


def test_allreduce_min_and_max(three: LastingWorld) -> None:
    def fn() -> None:
        rank = hvd.rank()
        values = [[1.0, 5.0, -3.0], [2.0, 4.0, -1.0], [3.0, 6.0, -2.0]]
        for op, winners in ((hvd.Min, [0, 1, 0]), (hvd.Max, [2, 2, 1])):
            mine = torch.tensor(values[rank], requires_grad=True)
            result = hvd.allreduce(mine, op=op)
            result.backward(incoming(result))
            check_gradient(mine, [6.0 * (winner == rank) for winner in winners])

    three.run(fn)


def test_allreduce_product(three: LastingWorld) -> None:
    def fn() -> None:
        rank = hvd.rank()
        # no zero; one; two; all
        values = torch.tensor([[2.0, 0.0, 0.0, 0.0], [3.0, 3.0, 0.0, 0.0], [-4.0, 5.0, 5.0, 0.0]], dtype=torch.float64)
        mine = values[rank].clone().requires_grad_()
        result = hvd.allreduce(mine, op=hvd.Product)
        assert result.tolist() == [-24.0, 0.0, 0.0, 0.0]
        result.backward(incoming(result))
        others = values[[other for other in range(3) if other != rank]].prod(0)
        check_gradient(mine, 6.0 * others)

    three.run(fn)


def test_grouped_allreduce(three: LastingWorld) -> None:
    def fn() -> None:
        for dtype, dim, (op, expected) in itertools.product(DTYPES[:2], DIMS, ((hvd.Sum, 6.0), (hvd.Average, 2.0))):
            group = [leaf(dtype, *[5] * dim) for _ in range(5)]
            group[3].requires_grad_(False)
            results = hvd.grouped_allreduce(group, op=op)
            for number, (result, mine) in enumerate(zip(results, group, strict=True)):
                if number != 3:
                    result.backward(incoming(result) * number, retain_graph=True)
                    check_gradient(mine, expected * number)

    three.run(fn)


def test_grouped_allreduce_in_one_backward(three: LastingWorld) -> None:
    def fn() -> None:
        group = [leaf(torch.float64, 2), leaf(torch.float32, 3)]
        first, second = hvd.grouped_allreduce(group, op=hvd.Sum)
        ((1 + hvd.rank()) * (first.sum() + 10 * second.sum())).backward()
        check_gradient(group[0], 6.0)
        check_gradient(group[1], 60.0)

    three.run(fn)


@pytest.mark.parametrize("mean", [False, True], ids=["sum", "average"])
def test_allgather(three: LastingWorld, mean: bool) -> None:
    def fn(mean: bool) -> None:
        rank, size = hvd.rank(), hvd.size()
        options = {"grad_op": hvd.Average} if mean else {}
        counts = [3, 0, 7]
        for dtype, dim in itertools.product(DTYPES, DIMS):
            mine = leaf(dtype, counts[rank], *[5] * (dim - 1))
            gathered = hvd.allgather(mine, **options)
            # rank k's gradient is (k + 1) times the number of the rank that a row comes from
            owners = torch.cat([torch.full((count,), 1.0 + other) for other, count in enumerate(counts)]).to(dtype)
            gathered.backward(incoming(gathered) * owners.reshape(-1, *[1] * (dim - 1)))
            check_gradient(mine, 6.0 * (rank + 1) / (size if mean else 1))
        scalar = torch.tensor(2.0, requires_grad=True)
        hvd.allgather(scalar, **options).backward(torch.arange(3.0))
        check_gradient(scalar, float(rank) if mean else 3.0 * rank)

    three.run(fn, mean)


def test_grouped_allgather(three: LastingWorld) -> None:
    def fn() -> None:
        rank = hvd.rank()
        for dtype, dim in itertools.product(DTYPES[:2], DIMS):
            group = [leaf(dtype, rank + number, *[5] * (dim - 1)) for number in range(4)]
            for number, (mine, gathered) in enumerate(zip(group, hvd.grouped_allgather(group), strict=True)):
                gathered.backward(incoming(gathered) * number, retain_graph=True)
                check_gradient(mine, 6.0 * number)

    three.run(fn)


@pytest.mark.parametrize("mean", [False, True], ids=["sum", "average"])
def test_broadcast(three: LastingWorld, mean: bool) -> None:
    def fn(mean: bool) -> None:
        options = {"grad_op": hvd.Average} if mean else {}
        for dtype, dim, root in itertools.product(DTYPES, DIMS, range(hvd.size())):
            mine = leaf(dtype, *[5] * dim)
            result = hvd.broadcast(mine, root, **options)
            result.backward(incoming(result))
            check_gradient(mine, (2.0 if mean else 6.0) if hvd.rank() == root else 0.0)

    three.run(fn, mean)


def test_alltoall(three: LastingWorld) -> None:
    def fn() -> None:
        rank, size = hvd.rank(), hvd.size()
        for dtype, dim, equal in itertools.product(DTYPES[:2], DIMS, (False, True)):
            splits = [rank + 1] * size if equal else [rank + other for other in range(size)]
            mine = leaf(dtype, sum(splits), *[2] * (dim - 1))
            if equal:
                received = hvd.alltoall(mine)
                counts = [other + 1 for other in range(size)]
            else:
                received, given = hvd.alltoall(mine, splits)
                counts = given.tolist()
                assert not given.requires_grad
            # what came from rank i returns with 10 * me + i
            marks = torch.tensor([10.0 * rank + other for other in range(size) for _ in range(counts[other])])
            received.backward(marks.to(dtype).reshape(-1, *[1] * (dim - 1)).expand_as(received))
            wanted = torch.tensor([10.0 * other + rank for other in range(size) for _ in range(splits[other])])
            check_gradient(mine, wanted.reshape(-1, *[1] * (dim - 1)))

    three.run(fn)


@pytest.mark.parametrize("op", [hvd.Sum, hvd.Average], ids=["sum", "average"])
def test_reducescatter(three: LastingWorld, op: Any) -> None:
    def fn() -> None:
        size = hvd.size()
        divisor = size if op is hvd.Average else 1
        for dtype, dim, rows in itertools.product(DTYPES, DIMS, (1, 6, 8)):
            shares = [rows_of_rank(rows, size, rank) for rank in range(size)]
            owners = [1.0 + rank for rank, share in enumerate(shares) for _ in range(share.stop - share.start)]
            wanted = torch.tensor(owners).reshape(-1, *[1] * (dim - 1)) / divisor
            mine = leaf(dtype, rows, *[5] * (dim - 1))
            share = hvd.reducescatter(mine, op=op)
            share.backward(incoming(share))
            check_gradient(mine, wanted)
        mine = leaf(torch.float64, 3)
        share = hvd.reducescatter(mine, op=op, prescale_factor=0.5, postscale_factor=6.0)
        share.backward(incoming(share))
        check_gradient(mine, torch.tensor([3.0, 6.0, 9.0]) / divisor)

    three.run(fn)


def test_grouped_reducescatter(three: LastingWorld) -> None:
    def fn() -> None:
        for dtype, dim in itertools.product(DTYPES[:2], DIMS):
            group = [leaf(dtype, 6, *[5] * (dim - 1)) for _ in range(4)]
            for number, (mine, share) in enumerate(
                zip(group, hvd.grouped_reducescatter(group, op=hvd.Sum), strict=True)
            ):
                share.backward(incoming(share) * number, retain_graph=True)
                wanted = torch.tensor([1.0, 1.0, 2.0, 2.0, 3.0, 3.0]) * number
                check_gradient(mine, wanted.reshape(-1, *[1] * (dim - 1)))

    three.run(fn)


def test_process_sets(three: LastingWorld) -> None:
    def fn() -> None:
        rank = hvd.rank()
        with halves() as mine_set:
            members = list(mine_set.ranks)
            total = float(sum(member + 1 for member in members))
            place, count = mine_set.rank(), mine_set.size()
            calls: list[tuple[Callable[[torch.Tensor], torch.Tensor], Any]] = [
                (lambda t: hvd.allreduce(t, op=hvd.Sum, process_set=mine_set), total),
                (lambda t: hvd.allreduce(t, process_set=mine_set), total / count),
                (lambda t: hvd.grouped_allreduce([t, t.detach()], op=hvd.Sum, process_set=mine_set)[0], total),
                (lambda t: hvd.allgather(t[: place + 1], process_set=mine_set), [total] * (place + 1)),
                (lambda t: hvd.grouped_allgather([t], process_set=mine_set)[0], total),
                (lambda t: hvd.broadcast(t, members[-1], process_set=mine_set), total * (rank == members[-1])),
                (
                    lambda t: hvd.alltoall(t, process_set=mine_set),
                    [1.0 + member for member in members for _ in range(4 // count)],
                ),
                (
                    lambda t: hvd.reducescatter(t, op=hvd.Sum, process_set=mine_set),
                    [1.0 + member for member in members for _ in range(4 // count)],
                ),
                (
                    lambda t: hvd.grouped_reducescatter([t], process_set=mine_set)[0],
                    [(1.0 + member) / count for member in members for _ in range(4 // count)],
                ),
            ]
            for dtype, (call, wanted) in itertools.product(DTYPES[:2], calls):
                mine = leaf(dtype, 4)
                result = call(mine)
                result.backward(incoming(result))
                if isinstance(wanted, list):
                    wanted = torch.tensor(wanted + [0.0] * (4 - len(wanted)))
                check_gradient(mine, wanted)

    three.run(fn)


def test_the_gradient_of_all_losses(three: LastingWorld) -> None:
    def fn() -> None:
        """A chain of collectives, compared with the same in one process without collectives."""
        rank, size = hvd.rank(), hvd.size()
        torch.manual_seed(0)
        inputs = [torch.randn(6, 3, dtype=torch.float64) for _ in range(size)]
        weights = [torch.randn(3, 3, dtype=torch.float64) for _ in range(size)]

        mine = inputs[rank].clone().requires_grad_()
        hidden = torch.tanh(hvd.allgather(mine) @ weights[rank])
        hidden = hvd.alltoall(hidden)
        hidden = hvd.reducescatter(hidden.square(), op=hvd.Sum)
        hidden = hidden + hvd.broadcast(mine.sum(0), 1)
        loss = (hvd.allreduce(hidden.sin(), op=hvd.Average) * (rank + 1)).sum()
        loss.backward()

        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        each = [torch.tanh(torch.cat(leaves) @ weight) for weight in weights]
        each = [torch.cat([tensor.chunk(size)[other] for tensor in each]) for other in range(size)]
        summed = torch.stack([tensor.square() for tensor in each]).sum(0)
        each = [part + leaves[1].sum(0) for part in summed.chunk(size)]
        averaged = torch.stack([tensor.sin() for tensor in each]).mean(0)
        losses = [(averaged * (other + 1)).sum() for other in range(size)]
        torch.stack(losses).sum().backward()

        torch.testing.assert_close(loss, losses[rank])
        torch.testing.assert_close(mine.grad, leaves[rank].grad)

    three.run(fn)


def test_no_gradient_where_none_is_asked_for(three: LastingWorld) -> None:
    def fn() -> None:
        for call in (hvd.allreduce, hvd.allgather, hvd.alltoall, hvd.reducescatter, lambda t: hvd.broadcast(t, 0)):
            assert not call(torch.ones(3)).requires_grad
            assert not call(torch.ones(3, dtype=torch.int64)).requires_grad
            with torch.no_grad():
                assert not call(torch.ones(3, requires_grad=True)).requires_grad
        # only one rank's loss needs the gradient, but the others take part
        mine = torch.ones(3, requires_grad=True)
        result = hvd.allreduce(mine, op=hvd.Sum)
        result.backward(torch.full((3,), float(hvd.rank() == 1)))
        check_gradient(mine, 1.0)

    three.run(fn)


@needs_gpus(1)
def test_gpu(gpus: LastingWorld) -> None:
    def fn() -> None:
        size, rank, device = hvd.size(), hvd.rank(), torch.device("cuda", hvd.local_rank())
        total = float(sum(range(1, size + 1)))
        calls: list[tuple[Callable[[torch.Tensor], torch.Tensor], Any]] = [
            (lambda t: hvd.allreduce(t, op=hvd.Sum), total),
            (hvd.allreduce, total / size),
            (hvd.allgather, total),
            (lambda t: hvd.broadcast(t, 0), total * (rank == 0)),
            (hvd.alltoall, [1.0 + other for other in range(size) for _ in range(2)]),
            (lambda t: hvd.reducescatter(t, op=hvd.Sum), [1.0 + other for other in range(size) for _ in range(2)]),
        ]
        for dtype, (call, wanted) in itertools.product(DTYPES, calls):
            mine = torch.ones(2 * size, dtype=dtype, device=device, requires_grad=True)
            result = call(mine)
            result.backward(incoming(result))
            check_gradient(mine, wanted)

    gpus.run(fn)
