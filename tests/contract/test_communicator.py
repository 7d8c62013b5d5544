"""What every Communicator promises; each case runs inside the ranks of worlds of 1 (local), 2 and 3 (Gloo, MPI)."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator

import cloudpickle
import pytest
import torch

from spark_hvd.context.global_state import current
from spark_hvd.transport.communicator import Communicator, Handle, ReduceOp
from spark_hvd.transport.shapes import even_rows
from tests.ranks import Ranks, ranks

cloudpickle.register_pickle_by_value(sys.modules[__name__])

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SMALL_FLOATS = [torch.float8_e4m3fn, torch.float8_e5m2]
INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
UNSIGNED = [torch.uint16, torch.uint32, torch.uint64]
COMPLEX = [torch.complex64, torch.complex128]
MOVABLE = [*FLOATS, *SMALL_FLOATS, *INTEGERS, *UNSIGNED, torch.complex32, *COMPLEX, torch.bool]
SHAPES = [(), (0,), (5,), (2, 0, 3), (2, 1, 3, 2, 1, 2, 1, 2, 2)]


WORLDS = {
    "local": (1, "LocalCommunicator"),
    "gloo2": (2, "TorchCommunicator"),
    "gloo3": (3, "TorchCommunicator"),
    "mpi2": (2, "TorchCommunicator"),
    "mpi3": (3, "TorchCommunicator"),
}
MARKS = {"mpi3": pytest.mark.slow, "gloo2": pytest.mark.night, "mpi2": pytest.mark.night}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=MARKS.get(name, ())) for name in WORLDS],
)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def world(name: str) -> Iterator[Ranks]:
    with ranks(WORLDS[name][0], mpi=name.startswith("mpi")) as started:
        yield started


def sample(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Small values that every dtype holds exactly, different on every rank."""
    count = math.prod(shape)
    values = (torch.arange(count) * 7 + rank * 3) % 4
    if dtype == torch.bool:
        return (values % 2 == 0).reshape(shape)
    if dtype.is_complex:
        return torch.complex(values.double(), (values.double() + rank) % 3).to(dtype).reshape(shape)
    return values.to(dtype).reshape(shape)


def wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.dtype.is_complex else torch.float64)


def check(communicator: Communicator, reduced: torch.Tensor, inputs: list[torch.Tensor], op: ReduceOp) -> None:
    dtype = inputs[0].dtype
    stack = torch.stack([wide(tensor) for tensor in inputs])
    expected = {
        ReduceOp.SUM: lambda: stack.sum(0),
        ReduceOp.AVERAGE: lambda: stack.sum(0) / communicator.size,
        ReduceOp.MIN: lambda: stack.amin(0),
        ReduceOp.MAX: lambda: stack.amax(0),
        ReduceOp.PRODUCT: lambda: stack.prod(0),
    }[op]()
    if dtype == torch.bool:
        expected = expected != 0
    elif not (dtype.is_floating_point or dtype.is_complex):
        expected = expected.trunc()
    assert reduced.dtype == dtype
    assert reduced.shape == inputs[0].shape
    tolerance = 0.02 if dtype in (torch.float16, torch.bfloat16) else 0.2 if dtype in SMALL_FLOATS else 1e-6
    torch.testing.assert_close(wide(reduced), wide(expected), rtol=tolerance, atol=0)


def ops_of(dtype: torch.dtype) -> list[ReduceOp]:
    if dtype == torch.bool:
        return [op for op in ReduceOp if op not in (ReduceOp.AVERAGE, ReduceOp.ADASUM)]
    if dtype.is_complex:
        return [ReduceOp.SUM, ReduceOp.AVERAGE, ReduceOp.PRODUCT]
    return [op for op in ReduceOp if op is not ReduceOp.ADASUM]  # made of several collectives


REDUCIBLE = [*FLOATS, *SMALL_FLOATS, *INTEGERS, *UNSIGNED, *COMPLEX, torch.bool]


def allreduce_everything() -> None:
    communicator = current().communicator
    for dtype in REDUCIBLE:
        for op in ops_of(dtype):
            for shape in SHAPES:
                inputs = [sample(rank, shape, dtype) for rank in range(communicator.size)]
                mine = inputs[communicator.rank].clone()
                result = communicator.allreduce(mine, op).wait()
                assert result is mine
                check(communicator, mine, inputs, op)


def allreduce_strides() -> None:
    communicator = current().communicator
    base = [sample(rank, (4, 6), torch.float32) for rank in range(communicator.size)]
    views: list[Callable[[torch.Tensor], torch.Tensor]] = [lambda t: t.t(), lambda t: t[::2, 1::2], lambda t: t[:, 0]]
    for view in views:
        inputs = [view(tensor) for tensor in base]
        whole = base[communicator.rank].clone()
        mine = view(whole)
        communicator.allreduce(mine, ReduceOp.SUM).wait()
        check(communicator, mine, inputs, ReduceOp.SUM)
        untouched = torch.ones(4, 6, dtype=torch.bool)
        view(untouched).fill_(False)
        assert torch.equal(whole[untouched], base[communicator.rank][untouched])
    conjugate = [torch.full((3,), complex(1, rank)) for rank in range(communicator.size)]
    mine = conjugate[communicator.rank].clone().conj()
    communicator.allreduce(mine, ReduceOp.SUM).wait()
    check(communicator, mine.resolve_conj(), [tensor.conj().resolve_conj() for tensor in conjugate], ReduceOp.SUM)


def nan_wins_min_and_max() -> None:
    communicator = current().communicator
    nan, infinity = math.nan, math.inf
    size, rank = communicator.size, communicator.rank
    rows = [[1.0, nan, nan, -2.0, infinity, -infinity, 0.0], [nan, -1.0, -nan, -3.0, 2.0, 2.0, -0.5], [4.0] * 7]
    for dtype in [*FLOATS, *SMALL_FLOATS]:
        for turn in range(size):  # whichever rank has it
            inputs = [torch.tensor(rows[(other + turn) % 3]).to(dtype) for other in range(size)]
            stack = torch.stack([tensor.double() for tensor in inputs])
            for op, wanted in ((ReduceOp.MIN, stack.amin(0)), (ReduceOp.MAX, stack.amax(0))):
                for shape in ((7,), (7, 1)):
                    mine = inputs[rank].clone().reshape(shape)
                    result = communicator.allreduce(mine, op).wait()
                    assert result.dtype == dtype
                    assert torch.equal(result.double().reshape(-1).nan_to_num(77.0), wanted.nan_to_num(77.0)), (
                        dtype,
                        op,
                    )
                    many = inputs[rank].clone().repeat(size).reshape(7 * size, *shape[1:])
                    share = communicator.reducescatter(many, op).wait()
                    assert torch.equal(share.double().reshape(-1).nan_to_num(77.0), wanted.nan_to_num(77.0))


def odd_strides(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Views that torch calls contiguous although their strides differ from a new tensor's, and other odd ones."""
    return [
        tensor[:1, 1],
        tensor[:1, 1:2],
        tensor[1:2, 2:3].t(),
        tensor[:0, 1],
        tensor[:, 1:1],
        tensor[:1, 1].expand(3),
        tensor[1:2].expand(2, 6),
        tensor[0, 1],
        tensor.as_strided((1, 1, 1), (5, 7, 9)),
        tensor.as_strided((1, 6), (2, 1)),
        tensor.t(),
        tensor[:, ::2],
    ]


def strides_of_all_kinds() -> None:
    communicator = current().communicator
    size, rank = communicator.size, communicator.rank
    for dtype in (torch.float32, torch.float16, torch.bool, torch.complex64, torch.int16, torch.uint64, torch.float64):
        every = [odd_strides(sample(other, (4, 6), dtype)) for other in range(size)]
        for place, view in enumerate(every[rank]):
            same = [views[place] for views in every]
            assert torch.equal(communicator.broadcast(view.clone(), 0).wait(), same[0])
            if 0 not in view.stride():
                own = odd_strides(sample(rank, (4, 6), dtype))[place]
                assert torch.equal(communicator.broadcast(own, size - 1).wait(), same[-1])
                own = odd_strides(sample(rank, (4, 6), dtype))[place]
                check(communicator, communicator.allreduce(own, ReduceOp.SUM).wait(), same, ReduceOp.SUM)
            if view.dim() == 0:
                continue
            gathered = communicator.allgather(view, [len(each) for each in same]).wait()
            assert torch.equal(gathered, torch.cat(same))
            uneven = view if rank == 0 else view[:0]
            gathered = communicator.allgather(uneven, [len(view), *[0] * (size - 1)]).wait()
            assert torch.equal(gathered, same[0])
            splits = [len(view), *[0] * (size - 1)]  # all to rank 0
            received = [len(view) if rank == 0 else 0] * size
            moved = communicator.alltoall(view, splits, received).wait()
            assert torch.equal(moved, torch.cat(same) if rank == 0 else view[:0])
            share = communicator.reducescatter(view, ReduceOp.SUM).wait()
            low = sum(even_rows(len(view), size)[:rank])
            rows = [each[low : low + even_rows(len(view), size)[rank]] for each in same]
            check(communicator, share, rows, ReduceOp.SUM)


def average_truncates_toward_zero() -> None:
    communicator = current().communicator
    size = communicator.size
    for dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
        values = torch.tensor([1 - 2 * size, 2 * size - 1, -1, 1], dtype=dtype) * (communicator.rank == 0)
        averaged = communicator.allreduce(values.to(dtype), ReduceOp.AVERAGE).wait()
        expected = [math.trunc(v / size) for v in (1 - 2 * size, 2 * size - 1, -1, 1)]
        assert averaged.tolist() == expected
    # the sum leaves the dtype's range, the average does not
    for dtype in (torch.int8, torch.uint8, torch.int16, torch.int32):
        most = torch.iinfo(dtype).max
        assert communicator.allreduce(torch.tensor([most], dtype=dtype), ReduceOp.AVERAGE).wait().tolist() == [most]


def order_of_uint64() -> None:
    communicator = current().communicator
    values = torch.tensor([2**63 + 5 if communicator.rank == 0 else 5], dtype=torch.uint64)
    top = communicator.allreduce(values.clone(), ReduceOp.MAX).wait()
    low = communicator.allreduce(values.clone(), ReduceOp.MIN).wait()
    assert top.tolist() == [2**63 + 5]
    assert low.tolist() == [5 if communicator.size > 1 else 2**63 + 5]


def average_of_uint64() -> None:
    communicator = current().communicator
    rank, size = communicator.rank, communicator.size
    values = [2**64 - 1, 2**63 + 5, 2**63, 2**63 - 1, 3 * size - 1, 0]
    mine = torch.tensor([value if rank == 0 else 0 for value in values], dtype=torch.uint64)
    averages = [value // size for value in values]
    assert communicator.allreduce(mine.clone(), ReduceOp.AVERAGE).wait().tolist() == averages
    rows = mine.repeat(size, 1)
    assert communicator.reducescatter(rows, ReduceOp.AVERAGE).wait().tolist() == [averages]


def undefined_reductions() -> None:
    communicator = current().communicator
    for dtype, op in (
        (torch.bool, ReduceOp.AVERAGE),
        (torch.complex64, ReduceOp.MIN),
        (torch.complex64, ReduceOp.MAX),
        (torch.quint8, ReduceOp.SUM),
    ):
        tensor = torch.empty(2, dtype=dtype) if dtype is not torch.quint8 else torch.empty(2).to(torch.uint8)
        if dtype is torch.quint8:
            tensor = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)
        for call in (communicator.allreduce, communicator.reducescatter):
            with pytest.raises(TypeError):
                call(tensor, op)
    with pytest.raises(TypeError, match="to_dense"):
        communicator.allreduce(torch.eye(2).to_sparse(), ReduceOp.SUM)


def gradients_stay_out() -> None:
    communicator = current().communicator
    leaf = torch.ones(3, requires_grad=True)
    communicator.allreduce(leaf, ReduceOp.SUM).wait()
    assert leaf.tolist() == [communicator.size] * 3
    assert leaf.requires_grad
    assert not communicator.allgather(leaf, [3] * communicator.size).wait().requires_grad
    assert not communicator.reducescatter(leaf, ReduceOp.SUM).wait().requires_grad
    strided = torch.ones(2, 2, requires_grad=True)
    communicator.broadcast(strided.t(), 0).wait()


def allgather_everything() -> None:
    communicator = current().communicator
    for dtype in MOVABLE:
        for shape in SHAPES:
            inputs = [sample(rank, shape, dtype) for rank in range(communicator.size)]
            rows = [shape[0] if shape else 1] * communicator.size
            gathered = communicator.allgather(inputs[communicator.rank], rows).wait()
            expected = torch.cat([tensor.reshape(1) if tensor.dim() == 0 else tensor for tensor in inputs])
            assert gathered.dtype == dtype
            assert torch.equal(wide(gathered), wide(expected))


def allgather_uneven() -> None:
    communicator = current().communicator
    for columns in (3, 300_000):  # padded, and by broadcasts
        for counts in ([1, 2, 3], [0, 4, 1], [2, 0, 0]):
            inputs = [sample(rank, (counts[rank], columns), torch.float32) for rank in range(communicator.size)]
            rows = counts[: communicator.size]
            gathered = communicator.allgather(inputs[communicator.rank], rows).wait()
            assert torch.equal(gathered, torch.cat(inputs))
    rows = [rank + 1 for rank in range(communicator.size)]
    inputs = [sample(rank, (3, rank + 1), torch.int16).t() for rank in range(communicator.size)]
    assert torch.equal(communicator.allgather(inputs[communicator.rank], rows).wait(), torch.cat(inputs))


def broadcast_everything() -> None:
    communicator = current().communicator
    for root in range(communicator.size):
        for dtype in MOVABLE:
            for shape in SHAPES:
                mine = sample(communicator.rank, shape, dtype)
                assert communicator.broadcast(mine, root).wait() is mine
                assert torch.equal(wide(mine), wide(sample(root, shape, dtype)))
        whole = torch.zeros(4, 4)
        view = whole.t()[1:, ::2]
        communicator.broadcast(view.copy_(sample(communicator.rank, (3, 2), torch.float32)), root).wait()
        assert torch.equal(view, sample(root, (3, 2), torch.float32))
    for root in (-1, communicator.size):
        with pytest.raises(ValueError, match=f"root_rank={root}"):
            communicator.broadcast(torch.zeros(1), root)


def reducescatter_everything() -> None:
    communicator = current().communicator
    size, rank = communicator.size, communicator.rank
    for dtype in REDUCIBLE:
        for op in ops_of(dtype):
            for rows in (0, 1, size, 2 * size + 1):
                inputs = [sample(other, (rows, 2), dtype) for other in range(size)]
                mine = inputs[rank].clone()
                share = communicator.reducescatter(mine, op).wait()
                counts = [rows // size + (other < rows % size) for other in range(size)]
                check(communicator, share, [torch.split(tensor, counts)[rank] for tensor in inputs], op)
                assert torch.equal(wide(mine), wide(inputs[rank]))
    with pytest.raises(ValueError, match="0-dim"):
        communicator.reducescatter(torch.tensor(1.0), ReduceOp.SUM)


def alltoall_everything() -> None:
    communicator = current().communicator
    size, rank = communicator.size, communicator.rank
    for dtype in MOVABLE:
        # rank r sends r + 2 * i rows to rank i
        splits = [[sender + 2 * receiver for receiver in range(size)] for sender in range(size)]
        inputs = [sample(sender, (sum(splits[sender]), 3), dtype) for sender in range(size)]
        counts = [splits[sender][rank] for sender in range(size)]
        received = communicator.alltoall(inputs[rank], splits[rank], counts).wait()
        parts = [torch.split(inputs[sender], splits[sender])[rank] for sender in range(size)]
        assert received.dtype == dtype
        assert torch.equal(wide(received), wide(torch.cat(parts)))
    assert communicator.alltoall(torch.empty(0, 4), [0] * size, [0] * size).wait().shape == (0, 4)
    assert communicator.alltoall(torch.empty(size, 0), [1] * size, [1] * size).wait().shape == (size, 0)


def handles() -> None:
    communicator = current().communicator
    tensors = [torch.full((100,), float(number)) for number in range(5)]
    started = [communicator.allreduce(tensor, ReduceOp.SUM) for tensor in tensors]
    for number in reversed(range(5)):
        result = started[number].wait()
        assert result is tensors[number]
        assert result[0] == number * communicator.size
        assert started[number].wait() is result
        assert result[0] == number * communicator.size  # a second wait changes nothing
        assert started[number].done()
    averaged = communicator.allreduce(torch.ones(3), ReduceOp.AVERAGE)
    assert averaged.wait().tolist() == averaged.wait().tolist() == [1.0] * 3
    assert isinstance(averaged, Handle)
    assert isinstance(communicator, Communicator)
    assert communicator.barrier().wait() is None


@pytest.mark.parametrize(
    "case",
    [
        allreduce_everything,
        allreduce_strides,
        average_truncates_toward_zero,
        order_of_uint64,
        average_of_uint64,
        undefined_reductions,
        gradients_stay_out,
        allgather_everything,
        allgather_uneven,
        broadcast_everything,
        nan_wins_min_and_max,
        strides_of_all_kinds,
        reducescatter_everything,
        alltoall_everything,
        handles,
    ],
    ids=lambda case: case.__name__,
)
def test_communicator(world: Ranks, case: Callable[[], None]) -> None:
    world.run(case)


def test_implementations(world: Ranks, name: str) -> None:
    assert set(world.run(lambda: type(current().communicator).__name__)) == {WORLDS[name][1]}
