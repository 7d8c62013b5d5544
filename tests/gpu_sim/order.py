"""Whether ranks can complete everything that they have launched on NCCL: a pure function of all launches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

Communicator = tuple[str, int]
"""A group's name and a device, counted within the rank."""
Place = tuple[Communicator, int]
"""A collective: its communicator, and the number of earlier launches there."""


class Launch(NamedTuple):
    """A collective that a rank has launched.

    Attributes:
        communicator: Its communicator.
        size: Number of ranks in it.
        what: What is launched; the same on all ranks.
        after: The collectives of other communicators that its stream waits for, the last of each.
    """

    communicator: Communicator
    size: int
    what: str
    after: Sequence[Place]


def as_launches(told: Sequence[Any]) -> list[Launch]:
    """Restore launches from JSON."""
    return [
        Launch((group, device), size, what, [((name, number), count) for (name, number), count in after])
        for (group, device), size, what, after in told
    ]


def faults_of_order(ranks: Sequence[Sequence[Launch]]) -> list[str]:
    """Return what would hang on real devices, one sentence each.

    A communicator runs one collective after the other, so all its ranks must launch the same ones in the same order.
    Those of two communicators may be launched in any order, as their kernels run at the same time; unless streams wait
    for each other so that, over all ranks, each kernel waits for the other.

    Args:
        ranks: The launches of each rank, in their order.
    """
    faults = []
    sequences = [_by_communicator(launches) for launches in ranks]
    for communicator in sorted(set().union(*sequences)):
        mine = [sequence.get(communicator, []) for sequence in sequences]
        if all(launch.size == 1 for launches in mine for launch in launches):
            continue
        for number in range(max(map(len, mine))):
            what = [launches[number].what if number < len(launches) else "nothing" for launches in mine]
            if len(set(what)) > 1:
                told = ", ".join(f"{each} on rank {rank}" for rank, each in enumerate(what))
                faults.append(f"order: launch {number} on {communicator[0]} is {told}")
                break
    return faults or _circles(ranks)


def _by_communicator(launches: Sequence[Launch]) -> dict[Communicator, list[Launch]]:
    found: dict[Communicator, list[Launch]] = {}
    for launch in launches:
        found.setdefault(launch.communicator, []).append(launch)
    return found


def _circles(ranks: Sequence[Sequence[Launch]]) -> list[str]:
    before: dict[Place, set[Place]] = {}
    for launches in ranks:
        for communicator, mine in _by_communicator(launches).items():
            for number, launch in enumerate(mine):
                place = communicator, number
                before.setdefault(place, set()).update(launch.after)
                if number:
                    before[place].add((communicator, number - 1))
    while before:
        free = [place for place, others in before.items() if not others & before.keys()]
        if not free:
            return [f"order: {sorted(before)} wait for each other"]
        for place in free:
            del before[place]
    return []
