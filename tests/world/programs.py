"""Random programs of ranks that call named collectives, and join."""

from __future__ import annotations

from collections import defaultdict
from random import Random
from typing import Any, NamedTuple

from spark_hvd.collectives.messages import AUTO, Request

RANKS = [0, 3, 4, 7, 8, 9, 10, 13, 20]
"""The ranks of the world, by place in the process set, so that texts can be told from places."""


class Round(NamedTuple):
    """A collective that all ranks call which still have data."""

    name: str
    kind: str
    variant: int
    """Part of the shape that is equal on all ranks."""
    odd: int | None
    """A place whose call does not match the others'."""


class Call(NamedTuple):
    """Starts a collective."""

    name: str
    request: Request


class Drain(NamedTuple):
    """Waits for all calls."""


class Join(NamedTuple):
    """Joins: the rank has no more data."""

    counts: bool


Program = list[Call | Drain | Join]


def request_of(collective: Round, place: int, size: int) -> Request:
    """Return a rank's request."""
    dtype = "int8" if collective.odd == place else "float32"
    rows, columns = place + collective.variant, 2 + collective.variant
    match collective.kind:
        case "allgather":
            return Request("allgather", [dtype] * 2, [[rows, columns], [2 * rows]], "cpu")
        case "objects":
            seal = f"{place} {collective.variant}" if place + collective.variant else None
            return Request("allgather", [dtype], [[rows + 1]], "cpu", seal=seal)
        case "alltoall":
            splits = [rows + other for other in range(size)]
            return Request("alltoall", [dtype], [[sum(splits), columns]], "cpu", splits=splits)
        case "barrier":
            return Request("barrier", [], [], "")
        case "scalars":
            return Request("allgather", [dtype], [[]], "cpu")
    return Request("allreduce", [dtype], [[columns]], "cpu", "AVERAGE")


class Epoch(NamedTuple):
    """What all ranks do until all have joined: collectives in sections, of which a rank executes the first few."""

    sections: list[list[Round]]
    lengths: list[int]
    """Number of sections of each rank."""
    counts: list[bool]
    """Whether Average counts each rank after it has joined."""
    drains: list[list[bool]]
    """Whether each rank waits at the end of a section."""

    def program(self, place: int, size: int, order: Random) -> Program:
        """Return one rank's program. Sections may overlap, so a rank may run ahead until it needs a name in use."""
        steps: Program = []
        for section, drain in zip(self.sections[: self.lengths[place]], self.drains[place], strict=False):
            mine: Program = [Call(each.name, request_of(each, place, size)) for each in section]
            order.shuffle(mine)
            steps += [*mine, Drain()] if drain else mine
        return [*steps, Join(self.counts[place])]

    def outcomes(self, place: int) -> dict[str, list[str]]:
        """Return the outcomes of one rank's calls, by name, if none stalls."""
        found: dict[str, list[str]] = defaultdict(list)
        for number, section in enumerate(self.sections[: self.lengths[place]]):
            here = [other for other, length in enumerate(self.lengths) if length > number]
            for each in section:
                odd = each.odd in here and len(here) > 1 and each.kind != "barrier"
                lacking = each.kind == "alltoall" and len(here) < len(self.lengths)
                found[each.name].append("mismatch" if odd or lacking else "run")
        return found


def epoch_of(chance: Random, size: int) -> Epoch:
    """Return a random epoch."""
    kinds = ["allreduce", "allgather", "objects", "alltoall", "barrier", "scalars"]
    names = {name: chance.choice(kinds) for name in ["a", "b", "c", "d", f"e{AUTO}1"][: chance.randint(1, 5)]}
    count = chance.randint(2, 8)

    def each(value: Any) -> list[Any]:
        return [value() for _ in range(size)]

    sections = [
        [
            Round(name, kind, int(chance.random() < 0.1), chance.randrange(size) if chance.random() < 0.07 else None)
            for name, kind in names.items()
            if chance.random() < 0.9
        ]
        for _ in range(count)
    ]
    lengths = each(lambda: chance.choice([count, count, count - 1, max(0, count - 2)]))
    drains = each(lambda: [chance.random() < 0.5 for _ in range(count)])
    return Epoch(sections, lengths, each(lambda: chance.random() < 0.5), drains)
