"""A coordinator of three ranks and what tests submit to it and read from its decisions."""

from __future__ import annotations

from collections.abc import Sequence

from spark_hvd.collectives.messages import Decision, Fail, Request, Run, RunKnown
from spark_hvd.engine.coordinator import Coordinator

USUAL = Request("allreduce", ["float32"], [[3]], "cpu", "SUM")
OTHER = USUAL._replace(shapes=[[4]])


def three(capacity: int = 1024, stall_timeout: float | None = None) -> Coordinator:
    # Ranks of the world other than their places, so that texts can be told from places.
    return Coordinator([1, 4, 6], capacity, stall_timeout)


def fresh(to: Coordinator, place: int, *names: str, request: Request = USUAL, now: float = 0.0) -> list[Decision]:
    return to.submitted(place, 0, [(name, request) for name in names], now)


def by_number(to: Coordinator, place: int, *ids: int, now: float = 0.0) -> list[Decision]:
    return to.submitted(place, sum(1 << id for id in ids), [], now)


def round_of(to: Coordinator, *names: str, request: Request = USUAL) -> list[Decision]:
    """All ranks are ready for these names, place 0 first."""
    return [decision for place in range(3) for decision in fresh(to, place, *names, request=request)]


def numbered(*names: str, request: Request = USUAL, stall_timeout: float | None = None) -> Coordinator:
    """A coordinator that has numbered these names, from 0 on."""
    to = three(stall_timeout=stall_timeout)
    round_of(to, *names, request=request)
    round_of(to, *names, request=request)
    return to


def works_by_number(to: Coordinator, id: int) -> bool:
    return [by_number(to, place, id) for place in range(3)] == [[], [], [RunKnown(1 << id)]] and not to.has_waiting


def run_names(decisions: Sequence[Decision]) -> list[str]:
    return [entry.name for decision in decisions if isinstance(decision, Run) for entry in decision.entries]


def failure(decisions: Sequence[Decision]) -> Fail:
    (fail,) = decisions
    assert isinstance(fail, Fail)
    return fail


def gather(*rows: int) -> Request:
    return Request("allgather", ["float32"] * len(rows), [[count, 2] for count in rows], "cpu")


def splits(*counts: int) -> Request:
    return Request("alltoall", ["float32"], [[sum(counts), 2]], "cpu", splits=list(counts))
