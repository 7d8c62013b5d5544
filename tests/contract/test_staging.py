"""Large all-reduces of ranks on one host: through shared memory, piece by piece, with the results of small ones."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist

import spark_hvd.torch as hvd
from spark_hvd.collectives import members
from spark_hvd.collectives.pending import rounds
from spark_hvd.collectives.pending.use import LARGEST
from spark_hvd.context.global_state import current
from spark_hvd.transport.host import shared_memory
from spark_hvd.transport.host.sliced import LEAST_AT_HOME as LEAST
from spark_hvd.transport.host.sliced import PIECE
from tests.ranks import Ranks, ranks

cloudpickle.register_pickle_by_value(sys.modules[__name__])

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64]


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def world(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with ranks(request.param) as started:
        yield started


def repeated(period: torch.Tensor, numel: int) -> torch.Tensor:
    return period.repeat(-(-numel // len(period)))[:numel]


def sample(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Repeat -3 to 3, starting with another number on each rank."""
    return repeated(((torch.arange(7) + rank) % 7 - 3).to(dtype), numel)


def expected(numel: int, dtype: torch.dtype, op: Any) -> torch.Tensor:
    total = sum(sample(rank, 7, torch.float64) for rank in range(hvd.size()))
    assert isinstance(total, torch.Tensor)
    if op is hvd.Average:
        total = total / hvd.size()
        total = total if dtype.is_floating_point else total.trunc()
    return repeated(total.to(dtype), numel)


def close(result: torch.Tensor, wanted: torch.Tensor) -> bool:
    tolerance = {torch.float16: 2e-3, torch.bfloat16: 2e-2}.get(wanted.dtype, 1e-6)
    return result.dtype == wanted.dtype and torch.allclose(result.double(), wanted.double(), atol=tolerance)


def spy() -> list[int]:
    """Record the sizes, in elements, of the shares that are summed in memory from now on."""
    seen: list[int] = []
    for module in (members, shared_memory):
        original = module.sum_share

        def watched(buffers: Any, *rest: Any, original: Any = original) -> None:
            seen.append(buffers[0].numel())
            original(buffers, *rest)

        module.sum_share = watched  # type: ignore[assignment]
    return seen


def test_dtypes_and_pieces(world: Ranks) -> None:
    def fn() -> list[int]:
        seen = spy()
        for dtype in DTYPES:
            for numel in (LEAST // dtype.itemsize, 6 * PIECE // dtype.itemsize + 3):
                for op in (hvd.Sum, hvd.Average) if numel * dtype.itemsize == LEAST else (hvd.Sum,):
                    mine = sample(hvd.rank(), numel, dtype)
                    result = hvd.allreduce(mine, op=op)
                    assert close(result, expected(numel, dtype, op)), (dtype, numel, op)
                    assert torch.equal(mine, sample(hvd.rank(), numel, dtype))
        hvd.barrier()
        return seen

    (first, *_) = world.run(fn)
    assert len(first) == len(DTYPES) * (2 + 7) - 1  # Gloo averages int32 in 64 bits
    assert 3 in first


def test_the_bits_of_gloo() -> None:
    """A sum of two numbers is the same, whichever rank computes it and however it is divided."""

    def fn() -> None:
        for numel in (LEAST // 4, 6 * PIECE // 4 + 3):
            mine = torch.randn(numel, generator=torch.Generator().manual_seed(hvd.rank()))
            wanted = mine.clone()
            dist.all_reduce(wanted)
            wanted.div_(hvd.size())
            for given in (mine, mine.repeat_interleave(2)[::2]):
                before = given.clone()
                assert torch.equal(hvd.allreduce(given), wanted)
                assert torch.equal(given, before)
                assert torch.equal(hvd.allreduce_(given), wanted)
                assert torch.equal(given, wanted)
                given.copy_(before)
            assert torch.equal(hvd.allreduce(mine, op=hvd.Sum, postscale_factor=0.5), wanted)

    with ranks(2) as world:
        seen = world.run(lambda: (spy(), fn())[0])
    assert len(seen[0]) == 5 * (1 + 7)


def test_a_small_sum_has_one_result() -> None:
    """In memory, through the coordinator, alone or with others: the ranks' numbers are added in one order."""

    def fn() -> None:
        dtypes = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
        chance = torch.Generator().manual_seed(hvd.rank())
        given = {
            f"{dtype} {n}": torch.randn(n, generator=chance).to(dtype) for dtype in dtypes for n in (1, 5, 999, 8192)
        }
        for op in (hvd.Sum, hvd.Average):
            seen: dict[str, torch.Tensor] = {}
            for turn in range(6):  # the first calls go through the coordinator, the others through memory
                for name, tensor in given.items():
                    result = hvd.allreduce(tensor, name=f"{op} {name}", op=op)
                    assert torch.equal(seen.setdefault(name, result), result), (turn, name)
            together = {name: hvd.allreduce_async(tensor, op=op) for name, tensor in given.items()}
            large = hvd.allreduce_async(torch.randn(LEAST // 8), op=op)
            for name, handle in together.items():
                assert torch.equal(hvd.synchronize(handle), seen[name]), name
            hvd.synchronize(large)

    with ranks(3) as world:
        world.run(fn)


def test_the_least_and_the_greatest_have_one_result(world: Ranks) -> None:
    def fn() -> None:
        rounds.MEMORY_SECONDS = 10.0
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            for op in (hvd.Min, hvd.Max):
                for zeros in ([0.0, -0.0, 0.0], [-0.0, 0.0, 0.0]):
                    given = torch.tensor([zeros[hvd.rank()], float("nan") if hvd.rank() else 1.0], dtype=dtype)
                    name = f"one result {dtype} {op} {zeros}"
                    results = [hvd.allreduce(given, name=name, op=op) for _ in range(5)]  # the last two in memory
                    assert len({result.view(torch.uint8).numpy().tobytes() for result in results}) == 1, name

    world.run(fn)


def test_an_average_of_integers_leaves_no_range(world: Ranks) -> None:
    def fn() -> None:
        for numel in (1, LEAST // 4):
            given = torch.full((numel,), 2**31 - 3 + hvd.rank(), dtype=torch.int32)
            wanted = sum(2**31 - 3 + rank for rank in range(hvd.size())) // hvd.size()
            for _ in range(5):
                assert set(hvd.allreduce(given, name=f"average of {numel}").tolist()) == {wanted}

    world.run(fn)


def test_forms(world: Ranks) -> None:
    def fn() -> None:
        numel = LEAST // 4
        seen = spy()
        parts = [sample(hvd.rank(), numel // 16, torch.float32).view(-1, 16) for _ in range(70)]
        handles = [hvd.allreduce_async(part, name=f"part.{k}", op=hvd.Sum) for k, part in enumerate(parts)]
        for handle in reversed(handles):
            assert close(handle.wait().reshape(-1), expected(numel // 16, torch.float32, hvd.Sum))
        assert seen, "fused, they are large enough"
        group = [sample(hvd.rank(), numel, torch.float64), torch.ones(0, dtype=torch.float64)]
        assert close(hvd.grouped_allreduce_(group)[0], expected(numel, torch.float64, hvd.Average))
        # in place on a tensor that is not contiguous, with scales
        strided = sample(hvd.rank(), 2 * numel, torch.float32)[::2]
        wanted = hvd.allreduce(strided.clone().double(), op=hvd.Sum).float() * 1.5
        assert close(hvd.allreduce_(strided, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0), wanted)
        whole = sample(hvd.rank(), 3 * PIECE // 4, torch.float32).view(3, -1)
        transposed = whole.t()
        wanted = expected(3 * PIECE // 4, torch.float32, hvd.Sum).view(3, -1).t()
        assert close(hvd.allreduce_(transposed, op=hvd.Sum), wanted)
        integers = torch.full((numel,), 5, dtype=torch.int32)
        assert hvd.allreduce(integers, postscale_factor=0.5).unique().tolist() == [2]  # truncated once
        # others take another path
        seen.clear()
        assert close(hvd.allreduce(sample(0, numel, torch.float32), op=hvd.Max), sample(0, numel, torch.float32))
        hvd.allreduce(torch.ones(LARGEST // 4 + 1))
        assert not seen

    world.run(fn)


def test_all_must_agree() -> None:
    def fn() -> bool:
        import os

        os.environ["SPARK_HVD_SHARED_MEMORY"] = "0" if hvd.rank() == 1 else "1"
        hvd.shutdown()
        hvd.init()
        assert hvd.allreduce(torch.ones(LEAST))[0] == 1.0
        return current().queue.members.staging is None

    with ranks(2) as world:
        assert world.run(fn) == [True, True]
