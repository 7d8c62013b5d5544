"""The synchronous collectives of the API: scales, compression, groups, deprecated arguments, on 1 and 2 ranks."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from typing import Any

import cloudpickle
import pytest
import torch

import spark_hvd.torch as hvd
from tests.ranks import Ranks, ranks

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module", params=[1, 2])
def world(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with ranks(request.param) as started:
        yield started


def test_allreduce_leaves_its_input(world: Ranks) -> None:
    def fn() -> tuple[Any, ...]:
        mine = torch.tensor([1.0, 2.0]) + hvd.rank()
        averaged = hvd.allreduce(mine)
        summed = hvd.allreduce(mine, op=hvd.Sum, name="any name")
        assert mine.tolist() == [1.0 + hvd.rank(), 2.0 + hvd.rank()]
        returned = hvd.allreduce_(mine, op=hvd.Max)
        assert returned is mine
        return averaged.tolist(), summed.tolist(), mine.tolist()

    expected = ([1.0, 2.0],) * 3 if world.size == 1 else ([1.5, 2.5], [3.0, 5.0], [2.0, 3.0])
    assert world.run(fn) == [expected] * world.size


def test_scales(world: Ranks) -> None:
    def fn() -> None:
        size = hvd.size()
        ones = torch.ones(3, dtype=torch.float64)
        assert hvd.allreduce(ones, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0).tolist() == [1.5 * size] * 3
        assert hvd.allreduce(ones, prescale_factor=0.5).tolist() == [0.5] * 3
        assert hvd.allreduce_(ones, op=hvd.Product, prescale_factor=2.0, postscale_factor=0.5)[0] == 2.0**size / 2
        # integers: each scale truncates toward zero; the average and its postscale truncate once, together
        fives = torch.tensor([5, -5])
        assert hvd.allreduce(fives, op=hvd.Sum, prescale_factor=0.5).tolist() == [2 * size, -2 * size]
        assert hvd.allreduce(fives, op=hvd.Average, postscale_factor=0.5).tolist() == [2, -2]
        assert fives.tolist() == [5, -5]
        share = hvd.reducescatter(torch.ones(2 * size), op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.25)
        assert share.tolist() == [0.5 * size] * 2
        with pytest.raises(TypeError, match="prescale_factor"):
            hvd.allreduce(torch.tensor([True]), op=hvd.Sum, prescale_factor=2.0)
        scaled = torch.tensor([1.0]).to(torch.float8_e5m2)
        assert hvd.allreduce(scaled, op=hvd.Max, postscale_factor=0.5).float().tolist() == [0.5]

    world.run(fn)


def test_average_argument(world: Ranks) -> None:
    def fn() -> None:
        ones = torch.ones(2)
        for call in (hvd.allreduce, hvd.allreduce_):
            with pytest.warns(DeprecationWarning, match="average="):
                assert call(ones.clone(), average=False).tolist() == [hvd.size()] * 2
            with pytest.warns(DeprecationWarning, match="average="):
                assert call(ones.clone(), average=True).tolist() == [1.0, 1.0]
            with pytest.raises(ValueError, match="both given"):
                call(ones, average=True, op=hvd.Sum)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            hvd.allreduce(ones)
        with pytest.raises(ValueError, match="op=0"):
            hvd.allreduce(ones, op=0)  # type: ignore[arg-type]

    world.run(fn)


def test_compression(world: Ranks) -> None:
    def fn() -> None:
        class Doubling:  # duck-typed, and an object
            def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, str]:
                return tensor * 2, "note"

            def decompress(self, tensor: torch.Tensor, ctx: str) -> torch.Tensor:
                assert ctx == "note"
                return tensor / 2

        third = torch.full((4,), 1 / 3)
        for compression, narrow in ((hvd.Compression.fp16, torch.float16), (hvd.Compression.bf16, torch.bfloat16)):
            reduced = hvd.allreduce(third, compression=compression)
            assert reduced.dtype == torch.float32
            assert torch.equal(reduced, third.to(narrow).float())
            assert hvd.allreduce(torch.tensor([7]), compression=compression).tolist() == [7]
            share = hvd.reducescatter(torch.full((hvd.size(),), 1 / 3), compression=compression)
            assert torch.equal(share, third[:1].to(narrow).float())
            half = torch.ones(2, dtype=torch.float16)
            assert hvd.allreduce(half, compression=compression, op=hvd.Sum).dtype == torch.float16
            assert half.tolist() == [1.0, 1.0]
        assert torch.equal(third, torch.full((4,), 1 / 3))
        assert hvd.allreduce(third, compression=Doubling(), op=hvd.Sum)[0].item() == pytest.approx(hvd.size() / 3)
        assert issubclass(hvd.Compression.fp16, hvd.Compressor)

    world.run(fn)


def test_grouped(world: Ranks) -> None:
    def fn() -> None:
        size, rank = hvd.size(), hvd.rank()
        group = [
            torch.full((3,), float(rank)),
            torch.tensor([rank, -1]),
            torch.full((2, 2), float(rank)).t(),
            torch.tensor(float(rank)),
            torch.empty(0),
            torch.full((2,), float(rank), dtype=torch.float64),
        ]
        total = sum(range(size))
        summed = hvd.grouped_allreduce(group, op=hvd.Sum)
        assert [tensor.dtype for tensor in summed] == [tensor.dtype for tensor in group]
        assert summed[1].tolist() == [total, -size]
        assert summed[2].tolist() == [[float(total)] * 2] * 2
        assert summed[3].item() == total
        assert group[0].tolist() == [float(rank)] * 3
        in_place = hvd.grouped_allreduce_(group, op=hvd.Sum)
        assert all(ours is theirs for ours, theirs in zip(in_place, group, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(in_place, summed, strict=True))
        halves = hvd.grouped_allreduce([torch.full((2,), 1 / 3)] * 2, compression=hvd.Compression.bf16)
        assert halves[0].dtype == torch.float32
        gathered = hvd.grouped_allgather([torch.full((rank + 1,), rank), torch.tensor(True)])
        assert gathered[0].tolist() == [other for other in range(size) for _ in range(other + 1)]
        assert gathered[1].tolist() == [True] * size
        shares = hvd.grouped_reducescatter([torch.ones(size), torch.ones(2 * size, 2)], op=hvd.Sum)
        assert [tuple(share.shape) for share in shares] == [(1,), (2, 2)]
        assert hvd.grouped_allreduce([]) == []

    world.run(fn)


def test_movement(world: Ranks) -> None:
    def fn() -> None:
        size, rank = hvd.size(), hvd.rank()
        mine = torch.tensor([rank])
        assert hvd.broadcast(mine, root_rank=size - 1).tolist() == [size - 1]
        assert mine.tolist() == [rank]
        assert hvd.broadcast_(mine, size - 1) is mine
        assert mine.tolist() == [size - 1]
        rows = torch.arange(2 * size) + 100 * rank
        even = hvd.alltoall(rows)
        assert isinstance(even, torch.Tensor)
        assert even.tolist() == [100 * other + 2 * rank + k for other in range(size) for k in range(2)]
        for splits in ([2] * size, torch.tensor([2] * size, dtype=torch.int32)):
            received, counts = hvd.alltoall(rows, splits=splits)
            assert torch.equal(received, even)
            assert counts.dtype == torch.int32
            assert counts.tolist() == [2] * size
        assert hvd.barrier() is None  # type: ignore[func-returns-value]

    world.run(fn)


def test_objects_of_any_size(world: Ranks) -> None:
    def fn() -> None:
        sizes = [10, 900, 1200, 100_000]
        for mine in range(len(sizes)):  # small pickles go through the coordinator, others do not
            values = [bytes(sizes[(mine + rank) % len(sizes)]) for rank in range(hvd.size())]
            assert hvd.allgather_object(values[hvd.rank()]) == values
            for root in range(hvd.size()):
                assert hvd.broadcast_object(values[hvd.rank()], root) == values[root]

    world.run(fn)


def test_wrong_arguments(world: Ranks) -> None:
    def fn() -> None:
        for call in (hvd.allreduce, hvd.allreduce_, hvd.allgather, hvd.alltoall, hvd.reducescatter):
            with pytest.raises(TypeError, match="got list"):
                call([1.0])  # type: ignore[arg-type]
        for grouped in (hvd.grouped_allreduce, hvd.grouped_allgather, hvd.grouped_reducescatter):
            with pytest.raises(TypeError, match="expected a"):
                grouped(torch.ones(2))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=f"root_rank={hvd.size()}"):
            hvd.broadcast(torch.ones(1), hvd.size())
        with pytest.raises(TypeError, match="device meta"):
            hvd.allreduce(torch.empty(2, device="meta"))

    world.run(fn)


def test_tensors_without_plain_memory_are_refused_and_the_world_lives(world: Ranks) -> None:
    def fn() -> None:
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
        quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)
        for tensor, word in ((nested, "nested"), (jagged, "nested"), (quantized, "quantized")):
            for call in (
                hvd.allreduce,
                hvd.allgather,
                hvd.alltoall,
                hvd.reducescatter,
                lambda t: hvd.broadcast(t, 0),
                lambda t: hvd.broadcast_(t, 0),
                lambda t: hvd.grouped_allgather([torch.ones(1), t]),
            ):
                with pytest.raises(TypeError, match=word):
                    call(tensor)
        narrow = torch.ones(3).to(torch.float8_e4m3fn)
        assert hvd.allgather(narrow).dtype == hvd.broadcast_object([narrow], 0)[0].dtype == narrow.dtype
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()

    world.run(fn)


def test_tensors_whose_elements_share_memory_take_no_result(world: Ranks) -> None:
    def fn() -> None:
        rows = torch.full((3, 1), float(hvd.rank()))
        for name in (None, "known", "known"):
            assert hvd.allreduce(rows.expand(3, 4), op=hvd.Sum, name=name).shape == (3, 4)
            for call in (
                lambda t: hvd.allreduce_(t, op=hvd.Sum, name="known"),
                lambda t: hvd.broadcast_(t, 0, name="known"),
                lambda t: hvd.grouped_allreduce_([torch.ones(1), t], op=hvd.Sum, name="grouped"),
                lambda t: hvd.broadcast_parameters({"expanded": t}),
            ):
                with pytest.raises(ValueError, match=r"as expand\(\) makes it.*pass tensor\.contiguous\(\)"):
                    call(rows.expand(3, 4))
        assert hvd.allreduce_(rows.expand(3, 1), op=hvd.Max).tolist() == [[hvd.size() - 1.0]] * 3

    world.run(fn)


def test_odd_strides(world: Ranks) -> None:
    def fn() -> None:
        size, rank = hvd.size(), hvd.rank()
        column = (torch.arange(12.0).view(4, 3) + rank)[:1, 1]
        assert hvd.allgather(column).tolist() == [1.0 + other for other in range(size)]
        assert hvd.grouped_allgather([column, column.view(1, 1)])[0].tolist() == [1.0 + other for other in range(size)]
        assert hvd.alltoall(column, torch.tensor([1] + [0] * (size - 1)))[0].numel() == (size if rank == 0 else 0)
        assert hvd.allreduce(column, op=hvd.Max).item() == size
        assert hvd.reducescatter(column, op=hvd.Sum).numel() == (rank == 0)
        parameters = {"odd": column.clone().as_strided((1,), (3,)), "same": torch.full((2, 1), float(rank)).t()}
        hvd.broadcast_parameters(parameters, root_rank=0)
        assert parameters["odd"].item() == 1.0
        assert parameters["same"].tolist() == [[0.0, 0.0]]
        assert hvd.broadcast_(column, 0).item() == 1.0

    world.run(fn)
