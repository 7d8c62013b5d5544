"""Mismatched calls raise the same error on every rank, and the job continues, also after a rank's own mistakes."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
import torch

import spark_hvd.torch as hvd
from tests.horovod.support import LastingWorld, alive, needs_gpus, same_everywhere

cloudpickle.register_pickle_by_value(sys.modules[__name__])

Call = Callable[[int], Any]

# The call on rank r, and words that must be in its error.
MISMATCHES: dict[str, tuple[Call, list[str]]] = {
    "allreduce_shape": (
        lambda r: hvd.allreduce(torch.ones([17 + r] * 3), name="op"),
        ["17, 17, 17", "18, 18, 18", r"\b0\b", r"\b1\b"],
    ),
    "allreduce_dimensions": (
        lambda r: hvd.allreduce(torch.ones([17, 23 * 57] if r == 0 else [17, 23, 57]), name="op"),
        ["17, 1311", "17, 23, 57"],
    ),
    "allreduce_dtype": (
        lambda r: hvd.allreduce(torch.ones(17, dtype=torch.float32 if r % 2 else torch.int32), name="op"),
        ["float32", "int32", r"\b1\b"],
    ),
    "allreduce_op": (
        lambda r: hvd.allreduce(torch.ones(3), op=hvd.Max if r == 2 else hvd.Sum, name="op"),
        ["(?i)max", "(?i)sum", r"\b2\b"],
    ),
    "allreduce_prescale": (
        lambda r: hvd.allreduce(torch.ones(3), prescale_factor=0.5 if r == 2 else 0.25, name="op"),
        ["prescale", r"0\.5", r"0\.25", r"\b2\b"],
    ),
    "allreduce_postscale": (
        lambda r: hvd.allreduce(torch.ones(3), postscale_factor=0.5 if r == 0 else 0.25, name="op"),
        ["postscale", r"0\.5", r"0\.25", r"\b0\b"],
    ),
    "in_place_shape": (
        lambda r: hvd.allreduce_(torch.ones(3 + r), name="op"),
        [r"\(3,?\)|\[3\]", r"\(4,?\)|\[4\]"],
    ),
    "kind": (
        lambda r: hvd.allgather(torch.ones(3), name="op") if r == 1 else hvd.allreduce(torch.ones(3), name="op"),
        ["allgather", "allreduce", r"\b1\b"],
    ),
    "kind_of_movement": (
        lambda r: hvd.alltoall(torch.ones(3), name="op") if r == 1 else hvd.broadcast(torch.ones(3), 0, name="op"),
        ["alltoall", "broadcast", r"\b1\b"],
    ),
    "allgather_columns": (
        lambda r: hvd.allgather(torch.ones(17, 10 * (r + 1), 17), name="op"),
        ["10, 17", "20, 17", r"\b0\b", r"\b1\b"],
    ),
    "allgather_dimensions": (
        lambda r: hvd.allgather(torch.ones([2, 3] if r else [2, 3, 1]), name="op"),
        [r"3, 1\b", r"3[\])]", r"\b0\b"],
    ),
    "allgather_dtype": (
        lambda r: hvd.allgather(torch.ones(17, dtype=torch.float64 if r == 2 else torch.int16), name="op"),
        ["float64", "int16", r"\b2\b"],
    ),
    "broadcast_shape": (
        lambda r: hvd.broadcast(torch.ones(17, 10 * (r + 1), 17), 0, name="op"),
        ["17, 10, 17", "17, 20, 17"],
    ),
    "broadcast_dtype": (
        lambda r: hvd.broadcast(torch.ones(17, dtype=torch.uint8 if r == 1 else torch.int64), 0, name="op"),
        ["uint8", "int64", r"\b1\b"],
    ),
    "broadcast_root": (
        lambda r: hvd.broadcast(torch.ones(17), r, name="op"),
        ["root", r"\b0\b", r"\b1\b"],
    ),
    "alltoall_dtype": (
        lambda r: hvd.alltoall(torch.ones(3, dtype=torch.int32 if r == 2 else torch.float32), name="op"),
        ["int32", "float32", r"\b2\b"],
    ),
    "alltoall_columns": (
        lambda r: hvd.alltoall(torch.ones(6, 10 * (r + 1), 6), name="op"),
        ["10, 6", "20, 6", r"\b0\b", r"\b1\b"],
    ),
    "reducescatter_shape": (
        lambda r: hvd.reducescatter(torch.ones([17 + r] * 3), name="op"),
        ["17, 17, 17", "18, 18, 18"],
    ),
    "reducescatter_dimensions": (
        lambda r: hvd.reducescatter(torch.ones([17, 23 * 57] if r == 0 else [17, 23, 57]), name="op"),
        ["17, 1311", "17, 23, 57"],
    ),
    "reducescatter_dtype": (
        lambda r: hvd.reducescatter(torch.ones(6, dtype=torch.int32 if r == 1 else torch.float32), name="op"),
        ["int32", "float32", r"\b1\b"],
    ),
    "reducescatter_op": (
        lambda r: hvd.reducescatter(torch.ones(6), op=hvd.Average if r == 1 else hvd.Sum, name="op"),
        ["(?i)average", "(?i)sum", r"\b1\b"],
    ),
    "group_shape": (
        lambda r: hvd.grouped_allreduce([torch.ones(2), torch.ones(5 if r == 2 else 4)], name="op"),
        [r"\(5,?\)|\[5\]", r"\(4,?\)|\[4\]", r"\b2\b"],
    ),
    "group_length": (
        lambda r: hvd.grouped_allreduce([torch.ones(2)] * (3 if r == 0 else 2), name="op"),
        [r"\b3\b", r"\b2\b"],
    ),
    "group_allgather_dtype": (
        lambda r: hvd.grouped_allgather([torch.ones(2), torch.ones(2).to(torch.int8 if r else torch.int16)], name="op"),
        ["int8", "int16"],
    ),
    "group_reducescatter_shape": (
        lambda r: hvd.grouped_reducescatter([torch.ones(3, 1 + r), torch.ones(3)], name="op"),
        ["3, 1", "3, 2"],
    ),
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_mismatch(three: LastingWorld, case: str) -> None:
    def fn(case: str) -> None:
        call, words = MISMATCHES[case]
        with pytest.raises(hvd.MismatchError) as caught:
            call(hvd.rank())
        text = same_everywhere(str(caught.value))
        assert "op" in text
        assert "rank" in text
        for word in words:
            assert re.search(word, text), (word, text)
        assert hvd.allreduce(torch.tensor([1.0]), op=hvd.Sum, name="op").tolist() == [3.0]  # the name is free again
        alive()

    three.run(fn, case)


def test_mismatch_is_no_internal_error() -> None:
    assert issubclass(hvd.MismatchError, ValueError)
    assert not issubclass(hvd.MismatchError, hvd.HorovodInternalError)
    assert issubclass(hvd.DuplicateNameError, ValueError)
    assert not issubclass(hvd.DuplicateNameError, hvd.HorovodInternalError)


def test_mismatch_among_others_in_flight(three: LastingWorld) -> None:
    def fn() -> None:
        rank = hvd.rank()
        names = [f"grad.{number}" for number in range(20)]
        for _ in range(3):
            handles = {
                name: hvd.allreduce_async(
                    torch.full((3 + (rank == 2 and number % 5 == 0),), float(number)), op=hvd.Sum, name=name
                )
                for number, name in enumerate(names)
            }
            for number, name in enumerate(names):
                if number % 5:
                    assert hvd.synchronize(handles[name]).tolist() == [3.0 * number] * 3
                    continue
                with pytest.raises(hvd.MismatchError, match=re.escape(name)) as caught:
                    hvd.synchronize(handles[name])
                same_everywhere(str(caught.value))
                assert hvd.poll(handles[name])
                with pytest.raises(hvd.MismatchError, match=re.escape(name)):
                    handles[name].wait()
        alive()

    three.run(fn)


def test_mismatch_of_what_went_well_before(three: LastingWorld) -> None:
    def fn() -> None:
        for step in range(6):  # what ranks have agreed on once must be compared again
            odd = step % 2 and hvd.rank() == 1
            mine = torch.ones(4 if odd else 3)
            if step % 2:
                with pytest.raises(hvd.MismatchError, match="weights"):
                    hvd.allreduce(mine, op=hvd.Sum, name="weights")
            else:
                assert hvd.allreduce(mine, op=hvd.Sum, name="weights").tolist() == [3.0] * 3
        # and another shape on all ranks is not an error
        for count in (3, 5, 3):
            assert hvd.allreduce(torch.ones(count), op=hvd.Sum, name="weights").tolist() == [3.0] * count

    three.run(fn)


def test_mismatch_leaves_tensors_alone(three: LastingWorld) -> None:
    def fn() -> None:
        mine = torch.full((3 + (hvd.rank() == 1),), 7.0)
        group = [torch.full((2,), 5.0), mine]
        for call in (
            lambda: hvd.allreduce_(mine, op=hvd.Sum, prescale_factor=3.0, name="op"),
            lambda: hvd.broadcast_(mine, 0, name="op"),
            lambda: hvd.grouped_allreduce_(group, op=hvd.Sum, name="op"),
        ):
            with pytest.raises(hvd.MismatchError, match="op"):
                call()
            assert mine.unique().tolist() == [7.0]
            assert group[0].tolist() == [5.0, 5.0]
        alive()

    three.run(fn)


STARTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "allreduce": lambda tensor: hvd.allreduce_async(tensor, op=hvd.Sum, name="twice"),
    "allreduce_": lambda tensor: hvd.allreduce_async_(tensor, op=hvd.Sum, name="twice"),
    "grouped_allreduce": lambda tensor: hvd.grouped_allreduce_async([tensor], op=hvd.Sum, name="twice"),
    "allgather": lambda tensor: hvd.allgather_async(tensor, name="twice"),
    "broadcast": lambda tensor: hvd.broadcast_async(tensor, root_rank=1, name="twice"),
    "broadcast_": lambda tensor: hvd.broadcast_async_(tensor, root_rank=1, name="twice"),
    "alltoall": lambda tensor: hvd.alltoall_async(tensor, name="twice"),
    "reducescatter": lambda tensor: hvd.reducescatter_async(tensor, op=hvd.Sum, name="twice"),
}


@pytest.mark.parametrize("start", STARTS)
def test_duplicate_name(three: LastingWorld, start: str) -> None:
    def fn(start: str) -> None:
        rank, call = hvd.rank(), STARTS[start]
        mine = torch.arange(3.0) + 10 * rank
        expected = {
            "allgather": [0.0, 1.0, 2.0, 10.0, 11.0, 12.0, 20.0, 21.0, 22.0],
            "broadcast": [10.0, 11.0, 12.0],
            "broadcast_": [10.0, 11.0, 12.0],
            "alltoall": [float(rank), 10.0 + rank, 20.0 + rank],
            "reducescatter": [30.0 + 3 * rank],
        }.get(start, [30.0, 33.0, 36.0])
        handle = None
        # rank 0 alone cannot have ended it when it asks for the second; then it is the others' turn for the last one
        for turn in range(hvd.size()):
            if rank == turn:
                handle = call(mine)
                if turn < hvd.size() - 1:
                    with pytest.raises(hvd.DuplicateNameError, match="twice"):
                        call(torch.arange(3.0))
            hvd.barrier()
        result = hvd.synchronize(handle)
        result = result[0] if isinstance(result, (list, tuple)) else result
        assert result.tolist() == expected
        # the name is free now
        hvd.synchronize(call(torch.arange(3.0)))
        alive()

    three.run(fn, start)


def test_no_handles(three: LastingWorld) -> None:
    def fn() -> None:
        for wrong in (None, 7, "name", torch.ones(1), object()):
            with pytest.raises(TypeError, match=r"(?i)handle"):
                hvd.synchronize(wrong)
            with pytest.raises(TypeError, match=r"(?i)handle"):
                hvd.poll(wrong)
        alive()

    three.run(fn)


def test_wrong_arguments(three: LastingWorld) -> None:
    def fn() -> None:
        calls = (
            hvd.allreduce_async,
            hvd.allreduce_async_,
            hvd.allgather_async,
            hvd.alltoall_async,
            hvd.reducescatter_async,
        )
        for call in calls:
            with pytest.raises(TypeError, match="list"):
                call([1.0])
            with pytest.raises(TypeError, match="meta"):
                call(torch.empty(3, device="meta"))
            with pytest.raises(TypeError, match="sparse"):
                call(torch.eye(3).to_sparse())
        with pytest.raises(ValueError, match="op=0"):
            hvd.allreduce_async(torch.ones(1), op=0)
        with pytest.raises(TypeError, match="bool"):
            hvd.allreduce_async(torch.tensor([True]))  # truth values have no average
        with pytest.raises(TypeError, match="complex"):
            hvd.allreduce_async(torch.tensor([1j]), op=hvd.Max)
        alive()

    three.run(fn)


def test_own_mistake_under_a_name(three: LastingWorld) -> None:
    def fn() -> None:
        if hvd.rank() == 1:
            with pytest.raises(TypeError, match="bool"):
                hvd.allreduce(torch.tensor([True]), name="loss")  # refused before it was sent
        assert hvd.allreduce(torch.tensor([1.0]), op=hvd.Sum, name="loss").tolist() == [3.0]

    three.run(fn)


@needs_gpus(1)
def test_cpu_and_gpu(two: LastingWorld) -> None:
    def fn() -> None:
        device = f"cuda:{hvd.local_rank() % torch.cuda.device_count()}"
        where = "cpu" if hvd.rank() % 2 else device
        for call in (
            lambda: hvd.allreduce(torch.ones([17] * 3, device=where), name="op"),
            lambda: hvd.grouped_allreduce([torch.ones(3, device=where)], name="op"),
            lambda: hvd.allgather(torch.ones(3, device=where), name="op"),
            lambda: hvd.broadcast(torch.ones(3, device=where), 0, name="op"),
        ):
            with pytest.raises(hvd.MismatchError, match=r"(?s)(?=.*cpu)(?=.*cuda)") as caught:
                call()
            same_everywhere(str(caught.value))
        alive()

    two.run(fn)
