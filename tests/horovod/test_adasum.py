"""Adasum: the sum of orthogonal vectors, the average of parallel ones, in pairs of neighbours; of any magnitude."""

from __future__ import annotations

import sys

import cloudpickle
import pytest
import torch

import spark_hvd.torch as hvd
from tests.horovod.support import LastingWorld, lasting

cloudpickle.register_pickle_by_value(sys.modules[__name__])

DTYPES = {torch.float16: 5e-3, torch.float32: 1e-5, torch.float64: 1e-10}


@pytest.fixture(scope="module")
def four():
    with lasting(4) as world:
        yield world


@pytest.fixture(params=[2, 4])
def world(request: pytest.FixtureRequest) -> LastingWorld:
    return request.getfixturevalue("two" if request.param == 2 else "four")


def combined(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """The formula for two vectors (Maleki et al., "Scaling Distributed Training with Adaptive Summation", 2021)."""
    dot = (first * second).sum()
    own = 1 - dot / (2 * first.square().sum())
    other = 1 - dot / (2 * second.square().sum())
    return own * first + other * second


def adasum(vectors: list[torch.Tensor]) -> torch.Tensor:
    """Combine neighbours first, then the results of neighbours."""
    vectors = [vector.double() for vector in vectors]
    while len(vectors) > 1:
        vectors = [combined(vectors[i], vectors[i + 1]) for i in range(0, len(vectors), 2)]
    return vectors[0]


def counts() -> list[int]:
    size = hvd.size()
    return [size * 20 - 17, size * 2 + 1, size + 2, 2**15]


def test_orthogonal(world: LastingWorld) -> None:
    def fn() -> None:
        torch.manual_seed(2)
        for dtype, tolerance in DTYPES.items():
            bases = [torch.linalg.qr(torch.randn(count, hvd.size(), dtype=torch.float64))[0] for count in counts()]
            handles = [hvd.allreduce_async(basis[:, hvd.rank()].to(dtype), op=hvd.Adasum) for basis in bases]
            for handle, basis in zip(handles, bases, strict=True):
                result = hvd.synchronize(handle)
                assert result.dtype == dtype
                torch.testing.assert_close(result.double(), basis.sum(1), rtol=tolerance, atol=tolerance)

    world.run(fn)


def test_parallel(world: LastingWorld) -> None:
    def fn() -> None:
        torch.manual_seed(2)
        for dtype, tolerance in DTYPES.items():
            directions = [torch.randn(count, dtype=torch.float64) for count in counts()]
            lengths = torch.rand(hvd.size(), dtype=torch.float64) + 0.5
            handles = [
                hvd.allreduce_async((direction * lengths[hvd.rank()]).to(dtype), op=hvd.Adasum)
                for direction in directions
            ]
            for handle, direction in zip(handles, directions, strict=True):
                expected = direction * lengths.mean()
                torch.testing.assert_close(
                    hvd.synchronize(handle).double(), expected, rtol=5 * tolerance, atol=5 * tolerance
                )

    world.run(fn)


def test_in_between(world: LastingWorld) -> None:
    def fn() -> None:
        torch.manual_seed(3)
        for dtype, tolerance in DTYPES.items():
            vectors = [torch.randn(33, dtype=torch.float64).add(0.5).to(dtype) for _ in range(hvd.size())]
            mine = vectors[hvd.rank()].clone()
            result = hvd.allreduce(mine, op=hvd.Adasum)
            torch.testing.assert_close(result.double(), adasum(vectors), rtol=5 * tolerance, atol=5 * tolerance)
            assert torch.equal(mine, vectors[hvd.rank()])
            assert hvd.allreduce_(mine, op=hvd.Adasum) is mine
            assert torch.equal(mine, result)

    world.run(fn)


def test_each_tensor_of_a_group_for_itself(two: LastingWorld) -> None:
    def fn() -> None:
        torch.manual_seed(4)
        group = [[torch.randn(count) for _ in range(2)] for count in (3, 40, 7)]
        results = hvd.grouped_allreduce([member[hvd.rank()] for member in group], op=hvd.Adasum)
        for result, member in zip(results, group, strict=True):
            torch.testing.assert_close(result.double(), adasum(member), rtol=1e-5, atol=1e-5)

    two.run(fn)


def test_zeros(world: LastingWorld) -> None:
    def fn() -> None:
        assert hvd.allreduce(torch.zeros(5), op=hvd.Adasum).tolist() == [0.0] * 5
        only = torch.arange(5.0) * (hvd.rank() == 1)
        assert hvd.allreduce(only, op=hvd.Adasum).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]

    world.run(fn)


def test_very_small_numbers(two: LastingWorld) -> None:
    def fn() -> None:
        torch.manual_seed(2)
        for dtype in DTYPES:
            tiny = torch.finfo(dtype).tiny
            direction = torch.randn(1024, dtype=torch.float64).abs() * tiny * 4
            result = hvd.allreduce((direction * (1 + hvd.rank())).to(dtype), op=hvd.Adasum).double()
            # the squares may vanish, which makes it a sum; in any case it lies between average and sum
            assert bool(result.isfinite().all())
            assert bool((result >= direction * 1.5 - 2 * tiny).all())
            assert bool((result <= direction * 3 + 2 * tiny).all())

    two.run(fn)


def test_very_different_numbers(two: LastingWorld) -> None:
    def fn() -> None:
        torch.manual_seed(2)
        lengths = [4.6e-10, 1.8e19]
        for swapped in (False, True):
            direction = torch.randn(1024, dtype=torch.float64)
            mine = (direction * lengths[hvd.rank() ^ swapped]).float()
            result = hvd.allreduce(mine, op=hvd.Adasum)
            torch.testing.assert_close(result.double(), direction * sum(lengths) / 2, rtol=1e-4, atol=0)

    two.run(fn)


def test_whole_numbers(two: LastingWorld) -> None:
    def fn() -> None:
        with pytest.raises((TypeError, ValueError), match=r"(?i)adasum"):
            hvd.allreduce(torch.ones(3, dtype=torch.int64), op=hvd.Adasum)
        assert hvd.allreduce(torch.ones(3), op=hvd.Adasum).tolist() == [1.0] * 3

    two.run(fn)
