"""Random programs of named collectives on real ranks, each in its own order, against a model in one process."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any, NamedTuple

import cloudpickle
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import spark_hvd.torch as hvd
from tests.ranks import LastingWorld

cloudpickle.register_pickle_by_value(sys.modules[__name__])

Tensors = list[torch.Tensor]

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
DTYPES = [*FLOATS, torch.uint8, torch.int32, torch.int64, torch.bool]
REDUCTIONS = [hvd.Sum, hvd.Average, hvd.Min, hvd.Max, hvd.Product]
SETS = {3: [[0, 2], [1, 2]]}
"""Process sets for each world size."""


def add_sets() -> None:
    sys.sets = [hvd.add_process_set(ranks) for ranks in SETS.get(hvd.size(), [])]  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def worlds() -> Iterator[dict[int, LastingWorld]]:
    started = {size: LastingWorld(size, add_sets, timeout=15) for size in range(1, 5)}
    yield started
    for world in started.values():
        world.close()


# ---- programs -------------------------------------------------------------------------------------------------------


class Call(NamedTuple):
    """A collective under one name, as all members of a process set call it, in some rounds."""

    kind: str
    dtype: torch.dtype
    op: Any
    shape: list[int]
    tensors: int
    in_place: bool
    scales: tuple[float, float]
    where: int
    """0: all ranks; otherwise the number of a process set, from 1."""
    rounds: int
    """The rounds in which it is called, as bits."""
    changes: bool
    """Whether its shape changes every other round."""


class Program(NamedTuple):
    calls: list[Call]
    rounds: int
    seed: int
    pauses: bool
    """Whether ranks are slow at random."""


@st.composite
def calls(draw: st.DrawFn, size: int) -> Call:
    kinds = ["allreduce", "allreduce", "adasum", "allgather", "broadcast", "alltoall", "reducescatter", "barrier"]
    kind = draw(st.sampled_from(kinds))
    op = hvd.Adasum if kind == "adasum" else draw(st.sampled_from(REDUCTIONS))
    usable = {"adasum": FLOATS, "allreduce": DTYPES, "reducescatter": DTYPES}.get(kind, [*DTYPES, torch.complex64])
    if op is hvd.Average:
        usable = [dtype for dtype in usable if dtype != torch.bool]
    dtype = draw(st.sampled_from(usable))
    scaled = kind in ("allreduce", "reducescatter") and dtype.is_floating_point
    return Call(
        kind,
        dtype,
        op,
        # All-reduces above 1 MiB may take another path.
        draw(st.sampled_from([[], [1], [5], [2, 3], [0], [1000], [7, 1, 3], [300, 1000]])),
        draw(st.sampled_from([1, 1, 1, 3])),
        draw(st.booleans()),
        draw(st.sampled_from([(1.0, 1.0), (0.5, 1.0), (1.0, 2.0)])) if scaled else (1.0, 1.0),
        draw(st.integers(0, len(SETS.get(size, [])))),
        draw(st.sampled_from([0b1111, 0b1111, 0b1011, 0b0101, 0b0001])),
        draw(st.sampled_from([False, False, False, True])),
    )


def programs(size: int) -> st.SearchStrategy[Program]:
    return st.builds(
        Program, st.lists(calls(size), min_size=1, max_size=12), st.integers(1, 4), st.integers(0, 999), st.booleans()
    )


def members_of(call: Call) -> list[int]:
    return SETS[hvd.size()][call.where - 1] if call.where else list(range(hvd.size()))


def root_of(call: Call) -> int:
    return members_of(call)[call.tensors % len(members_of(call))]


def shape_of(call: Call, turn: int) -> list[int]:
    return [*call.shape, 2] if call.changes and turn % 2 else call.shape


def rows_of(call: Call, place: int, turn: int) -> list[int]:
    """Return rows for each member, for alltoall; their sum for allgather."""
    random = Random(f"{call.kind} {place} {turn // 3}")  # the same for a few rounds, so that the name gets a number
    return [random.choice([0, 1, 2, 5]) for _ in members_of(call)]


def inputs(call: Call, place: int, turn: int, seed: int) -> Tensors:
    """Return a member's contribution: small whole numbers, whose sums and products have no rounding errors."""
    shape = shape_of(call, turn)
    if call.kind in ("allgather", "alltoall"):
        shape = [sum(rows_of(call, place, turn)), *shape[1:]]
    elif call.kind == "reducescatter":
        shape = shape or [1]
    generator = torch.Generator().manual_seed(hash((seed, place, turn, call.tensors)))
    whole = torch.randint(0 if call.dtype == torch.uint8 else -2, 4, (call.tensors, *shape), generator=generator)
    return [tensor.to(call.dtype).clone() for tensor in whole]


# ---- the model ------------------------------------------------------------------------------------------------------


def reduced(
    tensors: Tensors, op: Any, divisor: int | None = None, scales: tuple[float, float] = (1, 1)
) -> torch.Tensor:
    dtype = tensors[0].dtype
    stack = torch.stack([tensor.double() for tensor in tensors]) * scales[0]
    results: dict[Any, Callable[[], torch.Tensor]] = {
        hvd.Sum: lambda: stack.sum(0),
        hvd.Average: lambda: stack.sum(0) / (divisor or len(tensors)),
        hvd.Min: lambda: stack.amin(0),
        hvd.Max: lambda: stack.amax(0),
        hvd.Product: lambda: stack.prod(0),
    }
    result = results[op]() * scales[1]
    if dtype == torch.bool:
        return result != 0
    return result.to(dtype) if dtype.is_floating_point else result.trunc().long().to(dtype)  # wraps around


def adasum(vectors: Tensors) -> torch.Tensor:
    def pair(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        dot, a_square, b_square = (a * b).sum(), (a * a).sum(), (b * b).sum()
        return (1 - dot / (2 * a_square) if a_square else 1) * a + (1 - dot / (2 * b_square) if b_square else 1) * b

    power = 1 << (len(vectors).bit_length() - 1)
    level, extras = [vector.double() for vector in vectors[:power]], vectors[power:]
    level[: len(extras)] = [pair(a, b.double()) for a, b in zip(level, extras, strict=False)]
    while len(level) > 1:
        level = [pair(level[place], level[place + 1]) for place in range(0, len(level), 2)]
    return level[0].to(vectors[0].dtype)


def shares(rows: int, count: int) -> list[int]:
    return [rows // count + (place < rows % count) for place in range(count)]


def expected(call: Call, turn: int, seed: int) -> Tensors:
    """Return what this rank should get."""
    members = members_of(call)
    me = members.index(hvd.rank())
    everyones = [inputs(call, place, turn, seed) for place in range(len(members))]
    results = []
    for parts in zip(*everyones, strict=True):
        tensors = list(parts)
        if call.kind == "adasum":
            results.append(adasum(tensors))
        elif call.kind == "allreduce":
            results.append(reduced(tensors, call.op, scales=call.scales))
        elif call.kind == "reducescatter":
            whole = reduced(tensors, call.op, scales=call.scales)
            results.append(torch.split(whole, shares(len(whole), len(members)))[me])
        elif call.kind == "broadcast":
            results.append(tensors[members.index(root_of(call))])
        elif call.kind == "allgather":
            results.append(torch.cat(tensors))
        elif call.kind == "alltoall":
            mine = [torch.split(tensor, rows_of(call, place, turn))[me] for place, tensor in enumerate(tensors)]
            results.append(torch.cat(mine))
    return results[:1] if call.kind == "alltoall" else results


def check(found: Sequence[torch.Tensor], wanted: Tensors, what: object) -> None:
    assert len(found) == len(wanted), what
    for result, tensor in zip(found, wanted, strict=True):
        assert (result.dtype, result.shape) == (tensor.dtype, tensor.shape), what
        if tensor.dtype.is_floating_point:  # Average and Adasum round
            slack = 1e-5 if tensor.dtype in (torch.float32, torch.float64) else 2e-2
            assert torch.allclose(result.double(), tensor.double(), rtol=slack, atol=slack), (what, result, tensor)
        else:
            assert torch.equal(result, tensor), (what, result, tensor)


# ---- on the ranks ---------------------------------------------------------------------------------------------------


def start(call: Call, name: str, tensors: Tensors, turn: int) -> Any:
    where = {"process_set": sys.sets[call.where - 1]} if call.where else {}  # type: ignore[attr-defined]
    if call.kind == "barrier":
        return hvd.barrier(**where)
    what: Any = tensors[0] if call.tensors == 1 else tensors
    grouped = "" if call.tensors == 1 else "grouped_"
    in_place = "_" if call.in_place else ""
    scales = {"prescale_factor": call.scales[0], "postscale_factor": call.scales[1]}
    if call.kind in ("allreduce", "adasum"):
        return getattr(hvd, f"{grouped}allreduce_async{in_place}")(what, name=name, op=call.op, **scales, **where)
    if call.kind == "reducescatter":
        return getattr(hvd, f"{grouped}reducescatter_async")(what, name=name, op=call.op, **scales, **where)
    if call.kind == "allgather":
        return getattr(hvd, f"{grouped}allgather_async")(what, name=name, **where)
    if call.kind == "broadcast":
        return getattr(hvd, f"broadcast_async{in_place}")(tensors[0], root_of(call), name=name, **where)
    splits = rows_of(call, members_of(call).index(hvd.rank()), turn)
    return hvd.alltoall_async(tensors[0], splits, name=name, **where)


def shuffled(items: Sequence[tuple[int, Call]], random: Random) -> list[tuple[int, Call]]:
    """Return the calls in any order, except for barriers: they block, so their order must be the same everywhere."""
    mixed = random.sample(items, len(items))
    barriers = iter([item for item in items if item[1].kind == "barrier"])
    return [next(barriers) if item[1].kind == "barrier" else item for item in mixed]


def play(program: Program, fusion_threshold: int) -> None:
    hvd.init(fusion_threshold=fusion_threshold)
    for turn in range(program.rounds):
        random = Random(f"{program.seed} {turn} {hvd.rank()}")
        now = [(number, call) for number, call in enumerate(program.calls) if call.rounds >> turn & 1]
        mine = [(number, call) for number, call in now if hvd.rank() in members_of(call)]
        in_flight = []
        for number, call in shuffled(mine, random):
            tensors = inputs(call, place := members_of(call).index(hvd.rank()), turn, program.seed)
            if program.pauses and random.random() < 0.3:
                time.sleep(0.002 * random.random())
            handle = start(call, f"{call.kind} {number}", tensors, turn)
            if handle is not None:
                in_flight.append((handle, call, place, tensors))
        for handle, call, place, tensors in random.sample(in_flight, len(in_flight)):
            if random.random() < 0.2:
                hvd.poll(handle)
            result = hvd.synchronize(handle)
            if call.kind == "alltoall":
                result, received = result
                everyones = [rows_of(call, other, turn)[place] for other in range(len(members_of(call)))]
                assert received.tolist() == everyones, call
            found = result if isinstance(result, list) else [result]
            wanted = expected(call, turn, program.seed)
            check(found, wanted[:1] if call.kind == "broadcast" else wanted, (call, turn))
            if call.in_place and call.kind in ("allreduce", "adasum", "broadcast"):
                assert all(one is tensor for one, tensor in zip(found, tensors, strict=False)), call
            else:
                check(tensors, inputs(call, place, turn, program.seed), (call, "changed its input"))


quick = settings(derandomize=True, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("size", [1, 3, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 4))])
@settings(quick, max_examples=12)
@given(data=st.data())
def test_any_order(worlds: dict[int, LastingWorld], size: int, data: st.DataObject) -> None:
    play_one(worlds[size], data)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
@settings(quick, max_examples=20)
@given(data=st.data())
def test_other_programs_in_any_order(worlds: dict[int, LastingWorld], size: int, data: st.DataObject) -> None:
    play_one(worlds[size], data)


def play_one(world: LastingWorld, data: st.DataObject) -> None:
    program = data.draw(programs(world.size))
    world.run(play, program, data.draw(st.sampled_from([0, 2000, 128 << 20])))


def play_uneven(steps: list[int], counts: list[bool], seed: int) -> int:
    """A rank makes its steps and joins; the others continue without it."""
    rank, size = hvd.rank(), hvd.size()
    longest = steps.index(max(steps))
    for step in range(steps[rank]):
        here = [other for other in range(size) if steps[other] > step]
        divisor = len(here) + sum(counts[other] for other in range(size) if other not in here)
        everyones = {other: torch.randint(-3, 4, (5,), generator=generator_of(seed, step, other)) for other in here}
        mine = everyones[rank]
        starts: dict[str, Callable[[], Any]] = {
            "mean": lambda mine=mine: hvd.allreduce_async(mine.double(), name="mean"),
            "whole": lambda mine=mine: hvd.allreduce_async(mine, name="whole"),
            "least": lambda mine=mine: hvd.allreduce_async(mine.float(), op=hvd.Min, name="least"),
            "product": lambda mine=mine: hvd.allreduce_async(mine.float(), op=hvd.Product, name="product"),
            "sums": lambda mine=mine: hvd.grouped_allreduce_async([mine, mine.half()], op=hvd.Sum, name="sums"),
            "all": lambda mine=mine: hvd.allgather_async(mine[: rank + 1], name="all"),
            "of one": lambda mine=mine: hvd.broadcast_async(mine, longest, name="of one"),
        }
        random = Random(f"{seed} {step} {rank}")
        handles = {name: starts[name]() for name in random.sample(list(starts), len(starts))}
        found = {name: handles[name].wait() for name in random.sample(list(starts), len(starts))}
        tensors = list(everyones.values())
        wanted = {
            "mean": reduced([tensor.double() for tensor in tensors], hvd.Average, divisor),
            "whole": reduced(tensors, hvd.Average, divisor),
            "least": reduced([tensor.float() for tensor in tensors], hvd.Min),
            "product": reduced([tensor.float() for tensor in tensors], hvd.Product),
            "all": torch.cat([tensor[: other + 1] for other, tensor in everyones.items()]),
            "of one": everyones[longest],
        }
        total = reduced(tensors, hvd.Sum)
        check(found.pop("sums"), [total, total.half()], ("sums", step))
        check([found[name] for name in wanted], list(wanted.values()), step)
    last = hvd.join(count_in_average=counts[rank])
    assert hvd.allreduce(torch.tensor([1.0]), op=hvd.Sum).tolist() == [size]
    return last


def generator_of(*numbers: int) -> torch.Generator:
    return torch.Generator().manual_seed(hash(numbers))


@settings(quick, max_examples=12)
@given(
    steps=st.lists(st.integers(0, 4), min_size=3, max_size=3),
    counts=st.lists(st.booleans(), min_size=3, max_size=3),
    seed=st.integers(0, 999),
)
def test_uneven_data(worlds: dict[int, LastingWorld], steps: list[int], counts: list[bool], seed: int) -> None:
    first, *others = worlds[3].run(play_uneven, steps, counts, seed)
    assert others == [first] * 2
    if steps.count(max(steps)) == 1:
        assert first == steps.index(max(steps))


def test_overlapping_sets_in_opposite_orders(worlds: dict[int, LastingWorld]) -> None:
    def fn() -> list[float]:
        first, second = sys.sets  # type: ignore[attr-defined]
        rank = hvd.rank()
        mine = [one for one in (first, second) if one.included()]
        sums = []
        for turn in range(50):
            turned = mine if turn % 2 else mine[::-1]
            handles = [
                hvd.allreduce_async_(torch.full((20_000,), rank + 1.0), op=hvd.Sum, name="x", process_set=one)
                for one in turned
            ]
            sums += [handle.wait()[turn].item() for handle in handles[:: 1 if turn % 3 else -1]]
        return sums

    zero, one, two = worlds[3].run(fn)
    assert (zero, one) == ([4.0] * 50, [5.0] * 50)
    assert sorted(two) == [4.0] * 50 + [5.0] * 50


@settings(quick, max_examples=3)
@given(seed=st.integers(0, 999), count=st.integers(2, 8))
def test_adasum_among_others(worlds: dict[int, LastingWorld], seed: int, count: int) -> None:
    def fn() -> None:
        place, others = hvd.rank(), range(hvd.size())
        vectors = [torch.randn(64, generator=generator_of(seed, other), dtype=torch.float64) for other in others]
        wanted = {hvd.Adasum: adasum(vectors), hvd.Sum: sum(vectors), hvd.Max: torch.stack(vectors).amax(0)}
        for turn in range(3):
            names = [(op, f"{op} {number}") for op in wanted for number in range(count)]
            random = Random(f"{seed} {turn} {place}")
            mixed = random.sample(names, len(names))
            handles = [(op, hvd.allreduce_async(vectors[place], op=op, name=name)) for op, name in mixed]
            for op, handle in random.sample(handles, len(handles)):
                assert torch.allclose(handle.wait(), wanted[op], rtol=1e-12, atol=1e-12), (op, turn)

    for size in (3, 4):
        worlds[size].run(fn)
