"""allreduce: every reduction, dtype and number of dimensions; in place, asynchronous, scaled, compressed, sparse."""

from __future__ import annotations

import itertools
import random
import sys
import threading
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
    check,
    everyones,
    narrowed,
    needs_gpus,
    reduced,
    wide,
)

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name.lower())
def test_every_dtype_and_dimension(three: LastingWorld, op: Any) -> None:
    def fn() -> None:
        for dtype, dim in itertools.product(REDUCIBLE, (0, *DIMS)):
            tensors = everyones(dtype, *[5] * dim, most=3)
            mine = tensors[hvd.rank()]
            before = mine.clone()
            check(hvd.allreduce(mine, op=op), reduced(tensors, op))
            assert torch.equal(mine, before)

    three.run(fn)


def test_integer_average_truncates_toward_zero(three: LastingWorld) -> None:
    def fn() -> None:
        for dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
            values = torch.tensor([5, -5, 1, -1, 6, -6], dtype=dtype) * (hvd.rank() == 0)
            assert hvd.allreduce(values).tolist() == [1, -1, 0, 0, 2, -2]

    three.run(fn)


def test_averages_whose_sum_leaves_the_range(three: LastingWorld) -> None:
    """docs/collectives.md describes them."""

    def fn() -> None:
        size = hvd.size()
        half = torch.tensor([30000.0], dtype=torch.float16)
        assert hvd.allreduce(half).isinf().all()
        assert hvd.allreduce(half, prescale_factor=1 / size, op=hvd.Sum).item() == pytest.approx(30000, rel=2e-3)
        assert hvd.allreduce(half.float()).item() == 30000
        large = torch.tensor([1 << 62])
        assert hvd.allreduce(large).item() == -((1 << 62) // 3)  # of (3 << 62) - (1 << 64)
        assert hvd.allreduce(large.double()).item() == 1 << 62

    three.run(fn)


def test_bool_and_complex(three: LastingWorld) -> None:
    def fn() -> None:
        rank = hvd.rank()
        flags = torch.tensor([True, rank == 1, False])
        for op, expected in ((hvd.Sum, [True, True, False]), (hvd.Max, [True, True, False])):
            assert hvd.allreduce(flags, op=op).tolist() == expected
        for op in (hvd.Min, hvd.Product):
            assert hvd.allreduce(flags, op=op).tolist() == [True, False, False]
        for dtype in (torch.complex64, torch.complex128):
            values = torch.tensor([complex(rank, 1), 1j], dtype=dtype)
            assert hvd.allreduce(values, op=hvd.Sum).tolist() == [3 + 3j, 3j]
            assert hvd.allreduce(values)[0].item() == pytest.approx(1 + 1j)
            assert hvd.allreduce(values, op=hvd.Product).tolist()[1] == -1j

    three.run(fn)


def test_in_place(three: LastingWorld) -> None:
    def fn() -> None:
        for dtype, dim in itertools.product(REDUCIBLE, (0, *DIMS)):
            tensors = everyones(dtype, *[5] * dim)
            mine = tensors[hvd.rank()].clone()
            assert hvd.allreduce_(mine, op=hvd.Sum) is mine
            check(mine, reduced(tensors, hvd.Sum))
            mine = tensors[hvd.rank()].clone()
            handle = hvd.allreduce_async_(mine, op=hvd.Max, name="in place")
            assert hvd.synchronize(handle) is mine
            check(mine, reduced(tensors, hvd.Max))

    three.run(fn)


def test_any_stride(three: LastingWorld) -> None:
    def fn() -> None:
        tensors = everyones(torch.float32, 4, 6)
        for view in (lambda t: t.t(), lambda t: t[::2, 1::2], lambda t: t[:, 0], lambda t: t[1:1]):
            expected = reduced([view(tensor) for tensor in tensors], hvd.Sum)
            whole = tensors[hvd.rank()].clone()
            check(hvd.allreduce(view(whole), op=hvd.Sum), expected)
            assert torch.equal(whole, tensors[hvd.rank()])
            hvd.synchronize(hvd.allreduce_async_(view(whole), op=hvd.Sum))
            check(view(whole), expected)
            inside = torch.zeros_like(whole, dtype=torch.bool)
            view(inside).fill_(True)
            assert torch.equal(whole[~inside], tensors[hvd.rank()][~inside])

    three.run(fn)


def test_many_in_flight(three: LastingWorld) -> None:
    def fn() -> None:
        in_flight = []
        for number, (dtype, dim, op) in enumerate(itertools.product(REDUCIBLE, DIMS, (hvd.Sum, hvd.Average))):
            tensors = everyones(dtype, *[7] * dim, seed=number)
            in_flight.append((hvd.allreduce_async(tensors[hvd.rank()], op=op), reduced(tensors, op)))
        for handle, expected in in_flight:
            check(hvd.synchronize(handle), expected)
            assert hvd.poll(handle)

    three.run(fn)


def test_not_done_before_all_have_called(three: LastingWorld) -> None:
    def fn() -> None:
        mine = torch.tensor([1.0 + hvd.rank()])
        handle = None
        if hvd.rank() == 0:
            handle = hvd.allreduce_async(mine, op=hvd.Sum, name="early")
            assert not hvd.poll(handle)
            assert not handle.poll()
        hvd.barrier()
        if handle is None:
            handle = hvd.allreduce_async(mine, op=hvd.Sum, name="early")
        assert hvd.synchronize(handle).tolist() == [6.0]
        assert handle.poll()
        assert handle.wait().tolist() == [6.0]

    three.run(fn)


def test_hundred_handles_in_reverse(three: LastingWorld) -> None:
    def fn() -> None:
        rank, size = hvd.rank(), hvd.size()
        handles = [
            hvd.allreduce_async(torch.full((number + 1,), float(number + rank)), op=hvd.Sum, name=f"grad.{number}")
            for number in range(100)
        ]
        for number in reversed(range(100)):
            expected = size * number + sum(range(size))
            assert handles[number].wait(timeout=20).tolist() == [expected] * (number + 1)

    three.run(fn)


def test_another_order_on_every_rank(three: LastingWorld) -> None:
    def fn() -> None:
        shuffle = random.Random(hvd.rank()).shuffle
        for step in range(3):  # the same names again, which may be known the second time
            order = list(range(60))
            shuffle(order)
            handles = {}
            for number in order:
                mine = torch.full((1 + number * 37 % 50,), (hvd.rank() + 1) * number + step)
                handles[number] = hvd.allreduce_async(mine, op=hvd.Sum, name=f"layer{number}.weight")
            shuffle(order)
            for number in order:
                expected = 6 * number + 3 * step
                assert hvd.synchronize(handles[number]).tolist() == [expected] * (1 + number * 37 % 50)

    three.run(fn)


def test_unnamed_calls_are_matched_by_order(three: LastingWorld) -> None:
    def fn() -> None:
        rank = hvd.rank()
        reductions = [torch.tensor([10.0 * number + rank]) for number in range(5)]
        gathers = [torch.tensor([100 * number + rank]) for number in range(5)]
        # one count for each operation: which of the two comes first does not matter
        if rank == 0:
            sums = [hvd.allreduce_async(tensor, op=hvd.Sum) for tensor in reductions]
            rows = [hvd.allgather_async(tensor) for tensor in gathers]
        else:
            rows = [hvd.allgather_async(tensor) for tensor in gathers]
            sums = [hvd.allreduce_async(tensor, op=hvd.Sum) for tensor in reductions]
        assert [handle.wait().item() for handle in sums] == [30.0 * number + 3 for number in range(5)]
        assert [handle.wait().tolist() for handle in rows] == [[100 * n, 100 * n + 1, 100 * n + 2] for n in range(5)]

    three.run(fn)


def test_blocking_and_asynchronous_calls_meet(three: LastingWorld) -> None:
    def fn() -> None:
        mine = torch.tensor([hvd.rank()])
        if hvd.rank() == 1:
            total = hvd.allreduce(mine, name="meet", op=hvd.Sum)
        elif hvd.rank() == 0:
            total = hvd.synchronize(hvd.allreduce_async(mine, name="meet", op=hvd.Sum))
        else:
            total = hvd.allreduce_(mine, name="meet", op=hvd.Sum)
        assert total.tolist() == [3]

    three.run(fn)


def test_from_several_threads(three: LastingWorld) -> None:
    def fn() -> None:
        sums: dict[str, float] = {}

        def work(thread: int) -> None:
            order = list(range(20))
            random.Random(10 * hvd.rank() + thread).shuffle(order)
            handles = {
                f"t{thread}.{n}": hvd.allreduce_async(
                    torch.tensor([float(thread * 100 + n)]), op=hvd.Sum, name=f"t{thread}.{n}"
                )
                for n in order
            }
            sums.update({name: hvd.synchronize(handle).item() for name, handle in handles.items()})

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sums == {f"t{t}.{n}": 3.0 * (t * 100 + n) for t in range(4) for n in range(20)}

    three.run(fn)


def test_small_and_large(three: LastingWorld) -> None:
    def fn() -> None:
        sizes = [0, 1, 3, 1000, 2_000_003, 17, 300_000]
        handles = [hvd.allreduce_async(torch.full((n,), 1.0 + hvd.rank()), op=hvd.Sum, name=f"s{n}") for n in sizes]
        for handle, count in zip(handles, sizes, strict=True):
            total = hvd.synchronize(handle)
            assert total.shape == (count,)
            assert bool((total == 6.0).all())

    three.run(fn)


@pytest.mark.parametrize("where", ["prescale_factor", "postscale_factor"])
def test_scales(three: LastingWorld, where: str) -> None:
    def fn() -> None:
        for dtype, dim, factor in itertools.product([*INTEGERS, *FLOATS], DIMS, (0.375, 1.7)):
            tensors = everyones(dtype, *[5] * dim, most=10)
            result = hvd.allreduce(tensors[hvd.rank()], op=hvd.Sum, **{where: factor})
            if where == "prescale_factor":
                scaled = [narrowed(wide(tensor) * factor, dtype) for tensor in tensors]
                expected = reduced(scaled, hvd.Sum)
            else:
                expected = narrowed(wide(reduced(tensors, hvd.Sum)) * factor, dtype)
            check(result, expected, slack=ROUNDING.get(dtype, 0.0))

    three.run(fn)


def test_both_scales_and_average(three: LastingWorld) -> None:
    def fn() -> None:
        mine = torch.tensor([2.0, -4.0]) * (hvd.rank() + 1)
        averaged = hvd.allreduce(mine, prescale_factor=0.5, postscale_factor=3.0)
        assert averaged.tolist() == [6.0, -12.0]
        assert mine.tolist() == [2.0 * (hvd.rank() + 1), -4.0 * (hvd.rank() + 1)]

    three.run(fn)


def test_average_argument(three: LastingWorld) -> None:
    def fn() -> None:
        mine = torch.tensor([3.0])
        with pytest.warns(DeprecationWarning, match="average="):
            handle = hvd.allreduce_async(mine, average=False)
        assert hvd.synchronize(handle).tolist() == [9.0]
        with pytest.warns(DeprecationWarning, match="average="):
            handle = hvd.allreduce_async_(mine.clone(), average=True)
        assert hvd.synchronize(handle).tolist() == [3.0]
        for call in (hvd.allreduce_async, hvd.allreduce_async_):
            with pytest.raises(ValueError, match="both given"):
                call(mine, average=True, op=hvd.Sum)

    three.run(fn)


def test_compressors() -> None:
    for dtype in (torch.float32, torch.float64):
        narrow, ctx = hvd.Compression.fp16.compress(torch.ones(5, 5, 5, dtype=dtype))
        assert narrow.dtype == torch.float16
        restored = hvd.Compression.fp16.decompress(narrow, ctx)
        assert restored.dtype == dtype
        assert bool((restored == 1).all())
    for dtype in INTEGERS:
        tensor = torch.ones(5, 5, 5, dtype=dtype)
        same, ctx = hvd.Compression.fp16.compress(tensor)
        assert torch.equal(hvd.Compression.fp16.decompress(same, ctx), tensor)
        assert same.dtype == dtype


def test_compression(three: LastingWorld) -> None:
    def fn() -> None:
        third = torch.full((4,), 1 / 3)
        reduced_third = hvd.allreduce(third, compression=hvd.Compression.fp16, name="compressed")
        assert reduced_third.dtype == torch.float32
        assert torch.equal(reduced_third, third.half().float())
        assert hvd.allreduce(torch.tensor([7]), compression=hvd.Compression.fp16, op=hvd.Sum).tolist() == [21]

    three.run(fn)


def test_sparse(three: LastingWorld) -> None:
    def fn() -> None:
        rank = hvd.rank()
        torch.manual_seed(rank)
        dense = [torch.rand(rows, 10) for rows in (17, 32, 81, 12, 15, 23, 22)]
        for tensor in dense:
            tensor[tensor < 0.8] = 0
        for op in (hvd.Average, hvd.Sum):
            expected = [hvd.allreduce(tensor, op=op) for tensor in dense]
            handles = [
                hvd.sparse_allreduce_async(tensor.to_sparse(), name=f"{op}.{number}", op=op)
                for number, tensor in enumerate(dense)
            ]
            for number, handle in enumerate(handles):
                gathered = handle() if number % 2 else hvd.synchronize(handle)
                assert gathered.is_sparse
                assert gathered.is_coalesced()
                check(gathered.to_dense(), expected[number], slack=1e-6)
        # rows with different numbers of entries per rank, none on rank 0, all at one position
        rows = torch.sparse_coo_tensor(torch.zeros(1, rank, dtype=torch.int64), torch.ones(rank, 2), (3, 2))
        total = hvd.synchronize(hvd.sparse_allreduce_async(rows, name="rows", op=hvd.Sum))
        assert total.to_dense().tolist() == [[3.0, 3.0], [0.0, 0.0], [0.0, 0.0]]
        assert total.indices().tolist() == [[0]]

    three.run(fn)


@needs_gpus(1)
def test_gpu(gpus: LastingWorld) -> None:
    def fn() -> None:
        device = torch.device("cuda", hvd.local_rank())
        for dtype, dim, op in itertools.product((*INTEGERS, *FLOATS), DIMS, OPS):
            tensors = everyones(dtype, *[5] * dim, most=3)
            result = hvd.allreduce(tensors[hvd.rank()].to(device), op=op)
            assert result.device == device
            check(result.cpu(), reduced(tensors, op))
        handles = [hvd.allreduce_async(torch.full((9,), float(n), device=device), name=f"g{n}") for n in range(50)]
        assert [hvd.synchronize(handle)[0].item() for handle in reversed(handles)] == [float(n) for n in range(50)][
            ::-1
        ]

    gpus.run(fn)


@needs_gpus(4)
def test_several_gpus_a_rank(two: LastingWorld) -> None:
    def fn() -> None:
        for number, dtype in enumerate((torch.int32, torch.int64, torch.float16, torch.float32, torch.float64)):
            tensors = everyones(dtype, 5, 5)
            device = torch.device("cuda", hvd.local_rank() * 2 + (number + hvd.local_rank()) % 2)
            mine = tensors[hvd.rank()].to(device)
            hvd.allreduce_(mine, op=hvd.Sum)
            check(mine.cpu(), reduced(tensors, hvd.Sum))

    two.run(fn)
