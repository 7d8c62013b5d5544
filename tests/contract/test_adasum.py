"""Adasum on 1 to 5 ranks, against its formula in one process; each case runs inside the ranks."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from spark_hvd.collectives import adasum as adasum_module
from spark_hvd.collectives.adasum import adasum
from spark_hvd.context.global_state import current
from spark_hvd.transport.communicator import Communicator, Handle
from spark_hvd.transport.distributed import TorchCommunicator
from spark_hvd.transport.local import LocalCommunicator
from tests.ranks import Ranks, ranks

cloudpickle.register_pickle_by_value(sys.modules[__name__])

# Relative to the largest element: the rounding at the end, and for float32 and float64 also that of every level.
TOLERANCES = {torch.float16: 5e-4, torch.bfloat16: 4e-3, torch.float32: 1e-6, torch.float64: 1e-14}

Layers = list[torch.Tensor]


@pytest.fixture(scope="module")
def world() -> Iterator[Ranks]:
    with ranks(5) as started:
        yield started


def among_first(size: int, case: Callable[[Communicator], Any]) -> Any:
    """Run a case on the first `size` ranks as in a world of that size: 5 processes start faster than 15."""
    everyone = current().communicator
    group = dist.new_group(list(range(size)))
    try:
        if everyone.rank >= size:
            return None
        return case(LocalCommunicator() if size == 1 else TorchCommunicator(group))
    finally:
        everyone.barrier().wait()  # a group must not end while a rank uses it
        dist.destroy_process_group(group)


def run_now(steps: Generator[Handle[Any], None, None]) -> None:
    for handle in steps:
        handle.wait()


def pair(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    dot, a_square, b_square = (a * b).sum().item(), (a * a).sum().item(), (b * b).sum().item()
    a_factor = 1 - dot / (2 * a_square) if a_square > 1e-300 else 1
    b_factor = 1 - dot / (2 * b_square) if b_square > 1e-300 else 1
    return a_factor * a + b_factor * b


def tree(vectors: Layers) -> torch.Tensor:
    """One layer of all ranks, combined in float64 in the order that adasum() promises."""
    level = [vector.double() for vector in vectors]
    members = max(power for power in (1, 2, 4, 8) if power <= len(level))
    for extra in range(members, len(level)):
        level[extra - members] = pair(level[extra - members], level[extra])
    level = level[:members]
    while len(level) > 1:
        level = [pair(level[left], level[left + 1]) for left in range(0, len(level), 2)]
    return level[0]


def close(found: torch.Tensor, expected: torch.Tensor, atol: float) -> bool:
    # torch.testing.assert_close would import sympy, which takes seconds in every rank.
    return found.shape == expected.shape and bool(((found.double() - expected.double()).abs() <= atol).all())


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mixed(rank: int, dtype: torch.dtype) -> Layers:
    """Layers of odd sizes and different norms, some partly equal on all ranks, two of them not contiguous."""
    return [
        draw(rank, 1).to(dtype),
        (draw(1000, 7) + 0.3 * draw(rank, 7)).to(dtype),
        (100 * draw(rank, 1000)).to(dtype),
        draw(rank, 0).to(dtype),
        draw(rank + 100, 1).to(dtype)[0],
        (0.01 * (draw(1001, 6, 10) - draw(rank, 6, 10))).to(dtype).t()[::2, 1:],
        draw(rank, 3, 5, 7).to(dtype).permute(2, 0, 1),
    ]


def reduced(communicator: Communicator, make: Callable[[int], Layers]) -> Layers:
    """Reduce what make() returns on each rank, and compare with the formula."""
    everyones = [make(rank) for rank in range(communicator.size)]
    mine = make(communicator.rank)
    run_now(adasum(communicator, mine))
    for number, layer in enumerate(mine):
        inputs = [layers[number] for layers in everyones]
        expected = tree(inputs)
        assert layer.dtype == inputs[0].dtype
        largest = torch.cat([expected.reshape(-1), *(vector.reshape(-1) for vector in inputs)]).abs()
        atol = TOLERANCES[layer.dtype] * largest.max().item() if layer.numel() else 0.0
        assert close(layer, expected, atol), (layer, expected)
    return mine


def bits(layers: Layers) -> list[bytes]:
    return [bytes(layer.contiguous().reshape(-1).view(torch.uint8).tolist()) for layer in layers]


def layers_of_every_kind(communicator: Communicator) -> list[bytes]:
    found = []
    for dtype in TOLERANCES:
        found += bits(reduced(communicator, lambda rank, dtype=dtype: mixed(rank, dtype)))
    return found


def fewer_elements_than_ranks(communicator: Communicator) -> list[bytes]:
    found = []
    for count in range(8):
        found += bits(reduced(communicator, lambda rank, count=count: [draw(rank, count)]))
        found += bits(reduced(communicator, lambda rank, count=count: [*draw(rank, count)]))
    return found + bits(reduced(communicator, lambda rank: [torch.empty(0), torch.empty(3, 0)]))


def layers_above_a_chunk(communicator: Communicator) -> list[bytes]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adasum_module, "CHUNK", 8)
        return bits(reduced(communicator, lambda rank: mixed(rank, torch.float32)))


def zeros_on_some_ranks(communicator: Communicator) -> list[bytes]:
    size = communicator.size
    found = []
    for zeros in range(1 << size):

        def make(rank: int, zeros: int = zeros) -> Layers:
            return [draw(rank, 9).float() * (not zeros >> rank & 1), draw(rank, 2).float()]

        found.append(reduced(communicator, make))
    assert found[-1][0].tolist() == [0] * 9
    return [part for layers in found for part in bits(layers)]


def orthogonal_vectors_are_summed(communicator: Communicator) -> None:
    mine = torch.zeros(communicator.size)
    mine[communicator.rank] = communicator.rank + 1
    run_now(adasum(communicator, [mine]))
    assert mine.tolist() == [rank + 1 for rank in range(communicator.size)]


def parallel_vectors_are_averaged(communicator: Communicator) -> None:
    size = communicator.size
    for dtype, tolerance in TOLERANCES.items():
        vector = draw(7, 301).to(dtype)
        mine = vector.clone()
        run_now(adasum(communicator, [mine]))
        assert close(mine, vector, 4 * tolerance)
    if size in (1, 2, 4):  # otherwise one vector counts for two
        mine = vector * (communicator.rank + 1)
        run_now(adasum(communicator, [mine]))
        assert close(mine, vector * (size + 1) / 2, 1e-13)


def scale_does_not_matter(communicator: Communicator) -> None:
    plain = mixed(communicator.rank, torch.float32)
    run_now(adasum(communicator, plain))
    for exponent in (-60, -20, 40):
        scaled = [layer * 2.0**exponent for layer in mixed(communicator.rank, torch.float32)]
        run_now(adasum(communicator, scaled))
        for one, other in zip(plain, scaled, strict=True):
            assert torch.equal(one * 2.0**exponent, other)


def norms_at_the_limits(communicator: Communicator) -> None:
    everyones = [1e-170 * draw(rank, 20) for rank in range(communicator.size)]  # the squares are 0
    mine = everyones[communicator.rank].clone()
    run_now(adasum(communicator, [mine]))
    assert close(mine, sum(everyones, torch.zeros(())), 1e-184)
    # a denormal float32 next to a long vector: no float32 could hold the factor
    reduced(communicator, lambda rank: [((1e-42 if rank == 0 else 1e35) * draw(rank, 20)).float()])


def nan_stays_in_its_layer(communicator: Communicator) -> None:
    mine = [draw(communicator.rank, 50), draw(communicator.rank, 50)]
    if communicator.rank == communicator.size - 1:
        mine[0][20] = float("nan")
    run_now(adasum(communicator, mine))
    assert mine[0].isnan().sum() == (50 if communicator.size > 1 else 1)
    assert mine[1].isfinite().all()


def only_the_tensors_change(communicator: Communicator) -> None:
    whole = draw(communicator.rank, 6, 8)
    before = whole.clone()
    leaf = draw(communicator.rank, 3).requires_grad_()
    run_now(adasum(communicator, [whole[1::2, ::3], leaf]))
    outside = torch.ones(6, 8, dtype=torch.bool)
    outside[1::2, ::3] = False
    assert torch.equal(whole[outside], before[outside])
    assert torch.equal(whole, before) == (communicator.size == 1)
    assert leaf.requires_grad
    assert leaf.grad_fn is None


class Patient:
    """A handle that must have ended when wait() is called."""

    def __init__(self, handle: Handle[Any]) -> None:
        self._handle = handle
        self.ended = threading.Event()
        handle.when_done(self.ended.set)

    def wait(self) -> Any:
        assert self.ended.is_set()
        return self._handle.wait()


class Watched:
    """A communicator that records the calls and returns handles of the class above."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self.rank, self.size = communicator.rank, communicator.size
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., Patient]:
        def call(*args: Any, **options: Any) -> Patient:
            self.calls.append(name)
            return Patient(getattr(self._communicator, name)(*args, **options))

        return call


def steps_never_block(communicator: Communicator) -> list[str]:
    several, one = mixed(communicator.rank, torch.float32), [draw(communicator.rank, 30)]
    return driven(Watched(communicator), several) + driven(Watched(communicator), one)


def driven(watched: Watched, mine: Layers) -> list[str]:
    """Take each step when the previous one has ended; the tensors must change in the last."""
    before = bits(mine)
    steps = adasum(watched, mine)  # type: ignore[arg-type]
    assert watched.calls == []
    for number, handle in enumerate(steps, 1):
        assert len(watched.calls) == number
        assert bits(mine) == before
        assert isinstance(handle, Patient)
        assert handle.ended.wait(30)
    assert (bits(mine) == before) == (watched.size == 1)
    return watched.calls


def what_it_refuses(communicator: Communicator) -> None:
    for dtype in (torch.int64, torch.bool, torch.complex64):
        with pytest.raises(TypeError, match=rf"not {dtype}; convert with \.float\(\)"):
            adasum(communicator, [torch.ones(2), torch.ones(2).to(dtype)])
    with pytest.raises(TypeError, match="to_dense"):
        adasum(communicator, [torch.eye(2).to_sparse()])
    with pytest.raises(ValueError, match=r"of torch\.float32 on cpu and of torch\.float64 on cpu"):
        adasum(communicator, [torch.ones(2), torch.ones(2).double()])
    run_now(adasum(communicator, []))


@pytest.mark.parametrize(
    "case",
    [
        layers_of_every_kind,
        fewer_elements_than_ranks,
        layers_above_a_chunk,
        zeros_on_some_ranks,
        orthogonal_vectors_are_summed,
        parallel_vectors_are_averaged,
        scale_does_not_matter,
        norms_at_the_limits,
        nan_stays_in_its_layer,
        only_the_tensors_change,
        steps_never_block,
        what_it_refuses,
    ],
    ids=lambda case: case.__name__,
)
# Five have the levels of four, and an extra one as three have.
@pytest.mark.parametrize("size", [1, 2, *(pytest.param(size, marks=pytest.mark.slow) for size in (3, 4)), 5])
def test_adasum(world: Ranks, size: int, case: Callable[[Communicator], Any]) -> None:
    results = world.run(among_first, size, case)[:size]
    assert all(result == results[0] for result in results)  # the same bits, or the same collectives, on every rank


@pytest.mark.parametrize(("size", "levels", "extras"), [(1, 0, 0), (2, 1, 0), (3, 1, 1), (4, 2, 0), (5, 2, 1)])
def test_number_of_collectives(world: Ranks, size: int, levels: int, extras: int) -> None:
    calls = world.run(among_first, size, steps_never_block)[0]
    assert sorted(calls) == ["allgather"] * 2 * levels + ["alltoall"] * 4 * (levels + extras)  # for two reductions
