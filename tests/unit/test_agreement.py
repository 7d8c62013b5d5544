"""Which calls under one name match, and the messages about those that do not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from spark_hvd.collectives.messages import Request
from spark_hvd.engine.agreement import disagreement
from spark_hvd.world.words import ranks_text

REDUCE = Request("allreduce", ["float32"], [[17, 3]], "cpu", "SUM")
GATHER = Request("allgather", ["float32"], [[17, 3]], "cpu")
ROOTED = Request("broadcast", ["float32"], [[2]], "cpu", root=0)
EXCHANGE = Request("alltoall", ["float32"], [[4]], "cpu", splits=[1, 1, 2])


def group(count: int, kind: str = "allreduce") -> Request:
    op = "SUM" if kind == "allreduce" else None
    return Request(kind, ["float32"] * count, [[3, 5]] * count, "cpu", op)


def at(values: list[Any], place: int, value: object) -> list[Any]:
    return [*values[:place], value, *values[place + 1 :]]


def test_equal_requests_fit() -> None:
    for request in (REDUCE, GATHER, ROOTED, EXCHANGE, group(20), Request("barrier", [], [], "")):
        assert disagreement("a", {rank: request for rank in range(3)}) is None
        # as they come from JSON: equal, but not the same object
        assert disagreement("a", {rank: request._replace() for rank in range(3)}) is None


def test_rows_and_splits_may_differ() -> None:
    assert disagreement("a", {0: GATHER, 1: GATHER._replace(shapes=[[0, 3]])}) is None
    assert disagreement("a", {0: EXCHANGE, 1: EXCHANGE._replace(shapes=[[0]], splits=[0, 0, 0])}) is None
    assert disagreement("a", {0: GATHER._replace(shapes=[[]]), 1: GATHER._replace(shapes=[[4]])}) is None


def test_scales_are_compared_as_they_are_written() -> None:
    assert disagreement("a", {0: REDUCE, 1: REDUCE._replace(prescale=1)}) is None
    nans = REDUCE._replace(prescale=float("nan")), REDUCE._replace(prescale=float("nan"))
    assert disagreement("a", dict(enumerate(nans))) is None


DIFFERENCES: list[tuple[Request, dict[str, Any], str, str, str]] = [
    (group(2), {"dtypes": ["float32"], "shapes": [[3, 5]]}, "2 tensors", "1 tensor", "number of tensors"),
    (REDUCE, {"dtypes": ["int64"]}, "float32", "int64", "dtype"),
    (REDUCE, {"device": "cuda"}, "device cpu", "device cuda", "kind of device"),
    (REDUCE, {"op": "MAX"}, "op=Sum", "op=Max", "reduction"),
    (REDUCE, {"prescale": 0.5}, "prescale_factor=1.0", "prescale_factor=0.5", "scales"),
    (REDUCE, {"postscale": 0.25}, "postscale_factor=1.0", "postscale_factor=0.25", "scales"),
    (ROOTED, {"root": 2}, "root_rank=0", "root_rank=2", "root_rank"),
    (REDUCE, {"shapes": [[18, 3]]}, "shape (17, 3)", "shape (18, 3)", "shape"),
    (REDUCE, {"shapes": [[51]]}, "shape (17, 3)", "shape (51,)", "shape"),
    (REDUCE, {"shapes": [[]]}, "shape (17, 3)", "shape ()", "shape"),
    (GATHER, {"shapes": [[17, 4]]}, "shape (*, 3)", "shape (*, 4)", "dimensions after the first"),
    (GATHER, {"shapes": [[17]]}, "shape (*, 3)", "shape (*,)", "dimensions after the first"),
    (EXCHANGE, {"shapes": [[4, 2]]}, "shape (*,)", "shape (*, 2)", "dimensions after the first"),
]


@pytest.mark.parametrize(("usual", "changes", "first", "second", "what"), DIFFERENCES)
def test_a_difference_names_the_ranks_and_both_values(
    usual: Request, changes: dict[str, Any], first: str, second: str, what: str
) -> None:
    odd = usual._replace(**changes)
    text = disagreement("layer.0", {1: usual, 4: odd, 6: usual, 7: usual._replace(), 8: usual})
    assert text is not None
    assert text.startswith(f"{usual.kind} 'layer.0': ranks 1, 6-8 passed ")
    assert first in text
    assert "rank 4 passed " in text
    assert second in text
    assert text.endswith(f"; every rank must pass the same {what}.")


def test_different_operations() -> None:
    assert disagreement("a", {0: REDUCE, 1: GATHER, 2: REDUCE}) == (
        "ranks 0, 2 passed allreduce, rank 1 passed allgather for the name 'a'; every rank must call the same "
        "operation under one name."
    )


@pytest.mark.parametrize("count", [2, 17, 300])
@pytest.mark.parametrize("kind", ["allreduce", "allgather"])
def test_a_group_is_compared_to_its_last_tensor(count: int, kind: str) -> None:
    usual = group(count, kind)
    shapes = usual._replace(shapes=at(usual.shapes, count - 1, [3, 6]))
    text = disagreement("g", {0: usual, 1: shapes, 2: usual})
    first = "3" if kind == "allreduce" else "*"
    assert text is not None
    assert text.startswith(
        f"{kind} 'g', tensor {count} of {count}: ranks 0, 2 passed shape ({first}, 5), rank 1 passed shape ({first}, 6)"
    )
    dtypes = usual._replace(dtypes=at(usual.dtypes, count - 1, "int8"))
    text = disagreement("g", {0: usual, 1: usual, 2: dtypes})
    assert text is not None
    assert text.startswith(f"{kind} 'g', tensor {count} of {count}: ranks 0, 1 passed float32, rank 2 passed int8")


def test_a_fault_of_one_rank_is_told() -> None:
    odd = EXCHANGE._replace(fault="its splits contain a negative number", splits=[])
    text = "alltoall 'a' cannot run: on rank 3 its splits contain a negative number."
    assert disagreement("a", {2: EXCHANGE, 3: odd}) == text
    assert disagreement("a", {3: odd, 5: odd}) == text


def test_joined_ranks() -> None:
    assert disagreement("a", {0: REDUCE}, [1, 2]) is None
    assert disagreement("a", {0: GATHER}, [1]) is None
    assert disagreement("a", {1: ROOTED, 0: ROOTED}, [2]) is None
    text = disagreement("a", {1: ROOTED}, [0])
    assert text == "broadcast 'a' cannot run: its root, rank 0, has called join() and has nothing to send."
    for request, what in (
        (EXCHANGE, "alltoall"),
        (REDUCE._replace(kind="reducescatter"), "reducescatter"),
        (REDUCE._replace(op="ADASUM"), "Adasum"),
    ):
        text = disagreement("a", {0: request}, [1, 2, 3])
        assert text is not None
        assert text.endswith(f"cannot run: ranks 1-3 called join(), and {what} needs a tensor of every rank.")


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"),
        ([1, 0], "ranks 0, 1"),
        ([5, 0, 2, 3, 4], "ranks 0, 2-5"),
        (range(512), "ranks 0-511"),
        (range(0, 40, 2), f"ranks {', '.join(map(str, range(0, 32, 2)))}, and 4 more"),
    ],
)
def test_ranks_in_words(ranks: Sequence[int], text: str) -> None:
    assert ranks_text(ranks) == text


def test_many_values_are_cut_short() -> None:
    text = disagreement("a", {rank: REDUCE._replace(shapes=[[rank]]) for rank in range(512)})
    assert text is not None
    assert "rank 15 passed shape (15,), and 496 more; every rank" in text
