"""Batches of tensors to fuse: complete, bounded, one dtype each."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spark_hvd.collectives.fusion import batches, flatten, plan_batches, unflatten_into
from spark_hvd.collectives.messages import Entry, Request, bytes_of

DTYPES = [torch.float32, torch.float16, torch.int64]


@given(st.lists(st.tuples(st.integers(0, 40), st.sampled_from(DTYPES)), max_size=30), st.integers(1, 200))
def test_laws(kinds: list[tuple[int, torch.dtype]], limit: int) -> None:
    tensors = [torch.zeros(count, dtype=dtype) for count, dtype in kinds]
    found = batches(tensors, limit)
    assert sorted(index for members in found for index in members) == list(range(len(tensors)))
    for members in found:
        assert len({tensors[index].dtype for index in members}) == 1
        assert len(members) == 1 or sum(tensors[i].numel() * tensors[i].element_size() for i in members) <= limit


def test_round_trip_through_strides() -> None:
    tensors = [torch.arange(6.0).view(2, 3), torch.arange(4.0).view(2, 2).t(), torch.tensor(7.0), torch.empty(0, 2)]
    flat = flatten(tensors)
    assert flat.tolist() == [0, 1, 2, 3, 4, 5, 0, 2, 1, 3, 7]
    unflatten_into(flat + 1, tensors)
    assert tensors[1].tolist() == [[1, 3], [2, 4]]
    assert tensors[2].item() == 8


USUAL = Entry("a", Request("allreduce", ["float32"], [[2]], "cpu", "AVERAGE"))


def named(each: Entry, name: str) -> Entry:
    return each._replace(name=name)


def names(plan: list[list[Entry]]) -> list[str]:
    return ["".join(each.name for each in batch) for batch in plan]


def asked(**facts: object) -> Entry:
    return USUAL._replace(request=USUAL.request._replace(**facts))  # type: ignore[arg-type]


OTHERS = {
    "dtype": asked(dtypes=["int32"]),
    "device": asked(device="cuda"),
    "op": asked(op="SUM"),
    "prescale": asked(prescale=0.5),
    "postscale": asked(postscale=0.5),
    "absent": USUAL._replace(absent=[1], divisor=2),
    "divisor": USUAL._replace(absent=[1], divisor=3),
    "broadcast": asked(kind="broadcast", op=None, root=0),
    "root": asked(kind="broadcast", op=None, root=1),
}


@pytest.mark.parametrize("what", OTHERS)
def test_only_what_is_alike_travels_together(what: str) -> None:
    for other in [USUAL, *OTHERS.values()]:
        entries = [named(OTHERS[what], "a"), named(other, "b"), named(OTHERS[what], "c"), named(other, "d")]
        alike = other is OTHERS[what]
        assert names(plan_batches(entries, 1000)) == (["abcd"] if alike else ["ac", "bd"])


@pytest.mark.parametrize("kind", ["allgather", "alltoall", "reducescatter", "barrier"])
def test_what_travels_alone(kind: str) -> None:
    assert names(plan_batches([named(asked(kind=kind), name) for name in "abc"], 1000)) == ["a", "b", "c"]


def test_groups_stay_whole() -> None:
    group = asked(dtypes=["float32"] * 3, shapes=[[2], [], [4]])
    mixed = asked(dtypes=["float32", "int8"], shapes=[[2], [2]])
    entries = [named(each, name) for each, name in zip([group, mixed, USUAL, group], "abcd", strict=True)]
    assert names(plan_batches(entries, 64)) == ["b", "acd"]
    assert names(plan_batches(entries, 63)) == ["b", "ac", "d"]
    assert names(plan_batches(entries, 8)) == ["b", "a", "c", "d"]


@pytest.mark.parametrize("shape", [[0], [1]])
def test_a_threshold_of_0_is_no_fusion(shape: list[int]) -> None:
    assert names(plan_batches([named(asked(shapes=[shape]), name) for name in "abc"], 0)) == ["a", "b", "c"]


SHAPES = st.lists(st.integers(0, 4), max_size=2)
PARTS = st.tuples(st.sampled_from([*OTHERS.values(), USUAL]), st.lists(SHAPES, min_size=1, max_size=3))


@given(st.lists(PARTS, max_size=12), st.integers(0, 100))
def test_laws_of_plans(parts: list[tuple[Entry, list[list[int]]]], threshold: int) -> None:
    entries = [
        Entry(str(number), each.request._replace(shapes=shapes, dtypes=each.request.dtypes * len(shapes)), *each[2:])
        for number, (each, shapes) in enumerate(parts)
    ]
    plan = plan_batches(entries, threshold)
    assert sorted((each for batch in plan for each in batch), key=lambda each: int(each.name)) == entries
    last: dict[str, int] = {}
    for batch in plan:
        kind = repr(batch[0].request._replace(shapes=[], dtypes=batch[0].request.dtypes[:1])) + repr(batch[0][2:])
        numbers = [int(each.name) for each in batch]
        size = sum(bytes_of(each.request) for each in batch)
        assert numbers == sorted(numbers)
        assert len(batch) == 1 or size <= threshold
        if kind in last:  # a batch ends when the next entry does not fit
            assert last[kind] + bytes_of(batch[0].request) > threshold or threshold == 0
        last[kind] = size
