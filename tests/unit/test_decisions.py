"""Decisions and requests look the same at both ends of the wire."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_hvd.collectives.messages import (
    AllJoined,
    Decision,
    Entry,
    Fail,
    Gone,
    Learn,
    Pong,
    Request,
    Run,
    RunKnown,
    Trace,
    Tune,
    bytes_of,
    decode,
    encode,
)

NUMBERS = st.integers(0, 1 << 40)
LISTS = st.lists(NUMBERS, max_size=3)
REQUESTS = st.builds(
    Request,
    st.sampled_from(["allreduce", "allgather", "barrier"]),
    st.lists(st.sampled_from(["float32", "bool"]), max_size=3),
    st.lists(LISTS, max_size=3),
    st.sampled_from(["", "cpu", "cuda"]),
    st.none() | st.just("SUM"),
    st.floats(allow_nan=False),
    st.floats(allow_nan=False),
    st.none() | NUMBERS,
    st.none() | LISTS,
    st.none() | st.text(),
    st.none() | st.text(),
)
ENTRIES = st.builds(
    Entry,
    st.text(),
    REQUESTS,
    st.none() | st.lists(LISTS, max_size=3),
    st.none() | LISTS,
    st.none() | NUMBERS,
    st.none() | st.lists(st.none() | st.text(), max_size=3),
)
DECISIONS: st.SearchStrategy[Decision] = st.one_of(
    st.builds(Learn, NUMBERS, ENTRIES),
    st.builds(RunKnown, st.integers(0, 1 << 2000)),
    st.builds(Run, st.lists(ENTRIES, max_size=3)),
    st.builds(Fail, st.lists(st.text(), max_size=3), st.just("stall"), st.text(), st.none() | LISTS),
    st.builds(AllJoined, NUMBERS),
    st.builds(Gone, NUMBERS, st.text(), st.booleans()),
    st.builds(Tune, NUMBERS),
    st.builds(Trace, st.booleans(), st.booleans()),
    st.builds(Pong, NUMBERS, NUMBERS, NUMBERS),
)


@given(st.lists(DECISIONS, max_size=3))
def test_round_trip(decisions: list[Decision]) -> None:
    there = decode(encode(decisions))
    assert there == decisions
    assert [type(each) for each in there] == [type(each) for each in decisions]
    assert encode(there) == encode(decisions)


def types_in(value: Any) -> set[type]:
    inner = value if isinstance(value, (list, tuple)) else []
    return {type(value)}.union(*map(types_in, inner))


@given(ENTRIES)
def test_entries_stay_comparable(entry: Entry) -> None:
    (there,) = decode(encode([Run([entry])]))
    assert isinstance(there, Run)
    assert there.entries[0] == entry
    assert types_in(there) == types_in(Run([entry]))  # a tuple that became a list would compare unequal


@given(REQUESTS)
def test_a_request_compares_equal_to_its_copy_from_another_rank(request: Request) -> None:
    assert Request(*json.loads(json.dumps(request))) == request


def test_many_numbers() -> None:
    # Longer than CPython reads as decimal digits by default.
    ids = (1 << 100_000) - 1
    data = encode([RunKnown(ids)])
    assert decode(data) == [RunKnown(ids)]
    assert len(data) < 25_100


@pytest.mark.parametrize(
    ("dtypes", "shapes", "size"),
    [([], [], 0), (["float32"], [[]], 4), (["int8", "bool"], [[5], [0, 7]], 5), (["complex128"], [[3, 2]], 96)],
)
def test_bytes_of(dtypes: list[str], shapes: list[list[int]], size: int) -> None:
    assert bytes_of(Request("allreduce", dtypes, shapes, "cpu")) == size
