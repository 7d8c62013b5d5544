"""Repeated small calls on ranks of one host: in shared memory, or through the coordinator if needed."""

from __future__ import annotations

import functools
import math
import random
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import cloudpickle
import pytest
import torch

import spark_hvd.torch as hvd
from spark_hvd.collectives.pending import rounds
from spark_hvd.collectives.pending.use import LARGEST
from tests.contract.small_calls import DTYPES, LEARNT, by_coordinator, learn, mine, total, wait_in_memory
from tests.ranks import Ranks, ranks

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.slow), 3])
def world(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with ranks(request.param) as started:
        yield started


def test_all_that_suits_memory_goes_through_it(world: Ranks) -> None:
    def fn() -> None:
        wait_in_memory(10.0)
        for dtype in DTYPES:
            for shape in ((), (3, 5), (LARGEST // dtype.itemsize,)):
                scales = [(1.0, 1.0), (0.5, 3.0)] if dtype.is_floating_point and shape == (3, 5) else [(1.0, 1.0)]
                for op in (hvd.Sum, hvd.Average):
                    for before, after in scales:
                        how = dict(op=op, prescale_factor=before, postscale_factor=after)
                        name = f"{dtype} {shape} {op} {before}"
                        expected = total(before) / (hvd.size() if op is hvd.Average else 1) * after
                        expected = expected if dtype.is_floating_point else int(expected)
                        for turn in range(LEARNT + 3):
                            if turn == LEARNT:
                                decided = by_coordinator()
                            given = mine(shape, dtype)
                            result = hvd.allreduce(given, name=name, **how)
                            assert result.dtype == dtype
                            assert result.shape == shape
                            assert torch.allclose(result.double(), torch.tensor(expected, dtype=torch.float64), 1e-2)
                            assert torch.equal(given, mine(shape, dtype))
                            assert hvd.allreduce_(given, name=f"{name} in place", **how) is given
                            assert torch.equal(given, result)
                        assert by_coordinator() == decided, name

    world.run(fn)


def test_what_does_not_suit_memory_is_the_coordinators(world: Ranks) -> None:
    def fn() -> None:
        calls = {
            "large": lambda: hvd.allreduce(mine((LARGEST // 4 + 1,)), name="large", op=hvd.Sum)[0].item() == total(),
            "rows": lambda: len(hvd.allgather(torch.ones(hvd.rank() + 1), name="rows")) == total(),
            "adasum": lambda: hvd.allreduce(torch.ones(2), name="adasum", op=hvd.Adasum)[0].item() == 1,
            "bool": lambda: hvd.allreduce(torch.ones(1).bool(), name="bool", op=hvd.Sum).item() is True,
            "scaled": lambda: (
                hvd.allreduce(mine((1,), torch.int64), name="scaled", op=hvd.Sum, postscale_factor=2.0).item()
                == total(2)
            ),
            "group": lambda: hvd.grouped_allreduce([mine((1,))] * 2, name="group", op=hvd.Sum)[1].item() == total(),
            "empty": lambda: hvd.allreduce(torch.ones(0), name="empty").numel() == 0,
        }
        for name, call in calls.items():
            decided = by_coordinator()
            for turn in range(6):
                assert call(), name
                assert by_coordinator() == decided + turn + 1, name

    world.run(fn)


def test_other_kinds_of_calls_go_through_memory_too(world: Ranks) -> None:
    def fn() -> None:
        wait_in_memory(10.0)
        size = hvd.size()
        kinds: dict[str, tuple[Any, torch.Tensor]] = {}
        for dtype in DTYPES:
            given = mine((2, 3), dtype)
            whole = size == 2 or not dtype.is_floating_point  # otherwise the order of factors may show
            products = [(hvd.Product, math.factorial(size))] if whole else []
            for op, expected in ((hvd.Min, 1), (hvd.Max, size), *products):
                call = functools.partial(hvd.allreduce, given, op=op)
                kinds[f"{dtype} {op}"] = call, torch.full_like(given, expected)
        for dtype in [*DTYPES, torch.bool, torch.uint8, torch.complex64]:
            for shape in ((), (2, 3)):
                numbers = torch.arange(6)[: math.prod(shape)].view(shape)
                whole = [(numbers * (rank + 1)).to(dtype) for rank in range(size)]
                given = whole[hvd.rank()]
                rows = torch.cat([each.view(-1, *shape[1:]) for each in whole])
                kinds[f"{dtype} {shape} gathered"] = functools.partial(hvd.allgather, given), rows
                for root in range(size) if dtype is torch.float32 else (size - 1,):
                    kinds[f"{dtype} {shape} from {root}"] = functools.partial(hvd.broadcast, given, root), whole[root]
        numbers = torch.tensor([1.0, math.nan if hvd.rank() == 0 else 2.0, math.inf, -0.5 * hvd.rank()])
        lowest = torch.tensor([1.0, math.nan, math.inf, -0.5 * (size - 1)])
        kinds["not a number"] = functools.partial(hvd.allreduce, numbers, op=hvd.Min, postscale_factor=2.0), lowest * 2
        for name, (call, expected) in kinds.items():
            for turn in range(LEARNT + 3):
                if turn == LEARNT:
                    decided = by_coordinator()
                result = call(name=name)
                assert result.dtype == expected.dtype, name
                torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True, msg=name)
            assert by_coordinator() == decided, name

        for turn in range(LEARNT + 3):
            if turn == LEARNT:
                decided = by_coordinator()
            given = mine((4,))
            assert hvd.broadcast_(given, size - 1, name="in place") is given
            assert torch.equal(given, torch.full((4,), float(size)))
            assert hvd.allreduce_(given.neg_(), name="lowest in place", op=hvd.Min) is given
            assert torch.equal(given, torch.full((4,), -float(size)))
        assert by_coordinator() == decided

    world.run(fn)


def test_ranks_may_call_in_any_order_and_from_several_threads(world: Ranks) -> None:
    def fn() -> None:
        wait_in_memory(10.0)
        names = [f"any {number}" for number in range(40)]
        learn(*names, elements=10)
        decided = by_coordinator()
        for turn in range(5):
            order = random.Random(hvd.rank() + turn).sample(range(40), 40)
            handles = {n: hvd.allreduce_async_(mine((10,)) * n, name=names[n]) for n in order}
            for number in random.Random(hvd.rank()).sample(range(40), 40):
                expected = total(number) / hvd.size()
                assert torch.allclose(handles[number].wait(), torch.full((10,), expected))
        assert by_coordinator() == decided

        wrong: list[object] = []

        def calls(name: str) -> None:
            try:
                for turn in range(200):
                    result = hvd.allreduce(mine((3,)) * turn, name=name, op=hvd.Sum)
                    if not torch.equal(result, torch.full((3,), total(turn))):
                        wrong.append((name, turn, result))
            except Exception as error:
                wrong.append(error)

        threads = [threading.Thread(target=calls, args=(f"thread {number}",)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong

    world.run(fn)


def test_calls_of_one_moment_may_differ_in_all_that_they_are(world: Ranks) -> None:
    """Tensors adjacent in memory or not: with different dtypes, in another order, or smaller than their slot."""

    def fn() -> None:
        wait_in_memory(10.0)
        learn("call 4", elements=20, op=hvd.Sum)
        kinds = [
            *[((3,), torch.float16), ((3, 3), torch.float32), ((5,), torch.float32), ((4, 2), torch.float32)],
            *[((7,), torch.float32), ((), torch.float32), ((1,), torch.float16), ((9,), torch.float64)],
        ]
        scales = [1.0, 1.0, 1.0, 1.0, 1.0, 0.5, 1.0, 2.0]

        def together(numbers: Sequence[int], in_place: bool) -> None:
            handles = {}
            for number in numbers:
                shape, dtype = kinds[number]
                given = mine(shape[::-1], dtype).mul_(number + 1).movedim(-1, 0) if shape else mine(shape, dtype)
                start = hvd.allreduce_async_ if in_place else hvd.allreduce_async
                how = dict(op=hvd.Sum, prescale_factor=scales[number])
                handles[number] = start(given, name=f"call {number}", **how)
            for number, handle in handles.items():
                shape, dtype = kinds[number]
                expected = total(scales[number]) * (number + 1 if shape else 1)
                assert torch.equal(handle.wait(), torch.full(shape, expected, dtype=dtype)), number

        for turn in range(LEARNT + 1):
            together(range(len(kinds)), in_place=turn % 2 == 0)
        decided = by_coordinator()
        for numbers in (range(8), range(1, 6), [2, 1, 3], range(8), range(7, -1, -1), [4], range(8)):
            together(numbers, in_place=len(numbers) % 2 == 0)
        assert by_coordinator() == decided

    world.run(fn)


def test_a_rank_that_is_late_is_waited_for_by_the_coordinator(world: Ranks) -> None:
    def fn() -> None:
        wait_in_memory(0.1)
        learn("late", "beside")
        pauses = random.Random(hvd.rank())
        for turn in range(12):
            # As long as ranks wait in memory, so that some withdraw while others arrive.
            time.sleep(pauses.choice([0, rounds.MEMORY_SECONDS, 2 * rounds.MEMORY_SECONDS]))
            handle = hvd.allreduce_async(mine((2,)) * turn, name="beside", op=hvd.Average)
            assert hvd.allreduce(mine((1,)) * turn, name="late").item() == total(turn) / hvd.size()
            assert torch.equal(handle.wait(), torch.full((2,), total(turn) / hvd.size()))

    world.run(fn)

    def in_memory_again() -> None:
        wait_in_memory(10.0)
        learn("late")
        decided = by_coordinator()
        learn("late")
        assert by_coordinator() == decided

    world.run(in_memory_again)


def test_a_known_name_may_stand_for_something_else(world: Ranks) -> None:
    def fn() -> None:
        wait_in_memory(10.0)
        learn("changes", elements=4, op=hvd.Sum)
        for shape, dtype in [
            ((2, 3), torch.float32),
            ((500,), torch.float64),
            ((4,), torch.int32),
            ((4,), torch.float32),
        ]:
            for turn in range(LEARNT + 2):
                if turn == LEARNT:
                    decided = by_coordinator()
                result = hvd.allreduce(mine(shape, dtype), name="changes", op=hvd.Sum)
                assert torch.equal(result, torch.full(shape, total(), dtype=dtype))
            assert by_coordinator() == decided
        # If one rank calls it, all ranks raise; and the world still works.
        for last in (hvd.size() - 1, 0):
            given = torch.ones(5 if hvd.rank() == last else 4)
            with pytest.raises(hvd.MismatchError, match="'changes'"):
                hvd.allreduce(given, name="changes", op=hvd.Sum)
            assert torch.equal(given, torch.ones(len(given)))
            learn("changes", elements=4, op=hvd.Sum)

    world.run(fn)


def test_a_name_is_in_flight_once(world: Ranks) -> None:
    def fn() -> None:
        wait_in_memory(0.1)
        learn("once")
        hvd.barrier()
        if hvd.rank() == 0:
            handle = hvd.allreduce_async(mine((1,)), name="once")
            for _ in range(2):  # in memory, and then through the coordinator
                with pytest.raises(hvd.DuplicateNameError, match="'once' was called while allreduce 'once'"):
                    hvd.allreduce_async(mine((1,)), name="once")
                assert not handle.poll()
                with pytest.raises(TimeoutError):
                    handle.wait(timeout=2 * rounds.MEMORY_SECONDS)
        hvd.barrier()
        result = handle.wait() if hvd.rank() == 0 else hvd.allreduce(mine((1,)), name="once")
        assert result.item() == total() / hvd.size()

    world.run(fn)


def test_a_tensor_that_cannot_be_written_fails_alone(world: Ranks) -> None:
    def fn() -> None:
        names = ["one", "inference", "three"]
        learn(*names, elements=2)
        with torch.inference_mode():
            given = [mine((2,)), mine((2,)), mine((2,))]
        given = [given[0].clone(), given[1], given[2].clone()]
        handles = [hvd.allreduce_async_(*pair) for pair in zip(given, [None] * 3, names, strict=True)]
        assert torch.equal(handles[0].wait(), torch.full((2,), total() / hvd.size()))
        with pytest.raises(RuntimeError, match=r"(?i)inference"):
            handles[1].wait()
        assert torch.equal(handles[2].wait(), torch.full((2,), total() / hvd.size()))
        learn(*names, elements=2)

    world.run(fn)


def test_parts_of_the_world_have_memory_of_their_own() -> None:
    def fn() -> None:
        wait_in_memory(10.0)
        pair = hvd.add_process_set([0, 2])
        alone = hvd.add_process_set([1])
        learn("shared")
        for part in (pair, alone):
            if not part.included():
                continue
            learn("shared", op=hvd.Sum, process_set=part)
            decided = by_coordinator(part)
            for turn in range(5):
                result = hvd.allreduce(mine((1,)) + turn, name="shared", op=hvd.Sum, process_set=part)
                assert result.item() == sum(rank + 1 + turn for rank in part.ranks or [])
            assert by_coordinator(part) - decided == (5 if part is alone else 0)
        hvd.allreduce(mine((1,)), name="shared")
        assert hvd.remove_process_set(pair)
        assert hvd.remove_process_set(alone)
        learn("shared")

    with ranks(3) as three:
        three.run(fn)


def test_ranks_that_have_no_more_data_join(world: Ranks) -> None:
    def fn() -> list[float]:
        wait_in_memory(10.0)
        learn("uneven")
        seen = []
        for last in range(hvd.size()):
            steps = 2 + 3 * ((hvd.rank() + last) % hvd.size())
            seen += [hvd.allreduce(torch.ones(1), name="uneven", op=hvd.Sum).item() for _ in range(steps)]
            assert hvd.join() == (hvd.size() - 1 - last) % hvd.size()
        learn("uneven")
        decided = by_coordinator()
        learn("uneven")
        assert by_coordinator() == decided
        return seen

    size = world.size
    for rank, seen in enumerate(world.run(fn)):
        expected = []
        for last in range(size):
            steps = [2 + 3 * ((other + last) % size) for other in range(size)]
            expected += [sum(step < count for count in steps) for step in range(steps[rank])]
        assert seen == expected


def test_ranks_sleep_when_there_is_nothing_to_do(world: Ranks) -> None:
    def fn() -> float:
        wait_in_memory(0.1)
        learn("idle")
        time.sleep(3 * rounds.MEMORY_SECONDS)
        before = time.process_time()
        time.sleep(2)
        return time.process_time() - before

    assert max(world.run(fn)) < 0.05
