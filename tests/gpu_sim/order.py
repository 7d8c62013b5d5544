"""Whether ranks can come to the end of what they have launched on NCCL: a pure function of all their launches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

Communicator = tuple[str, int]
"""A group's name and a device, counted within the rank."""
Place = tuple[Communicator, int]
"""A collective: its communicator, and how many were launched there before."""


class Launch(NamedTuple):
    """A collective that a rank has launched.

    Attributes:
        communicator: Where.
        size: Ranks in it.
        what: What is launched; the same on all ranks.
        after: The collectives of other communicators that its stream waits for, the last of each.
    """

    communicator: Communicator
    size: int
    what: str
    after: Sequence[Place]


def as_launches(told: Sequence[Any]) -> list[Launch]:
    """Launches out of what JSON has made of them."""
    return [
        Launch((group, device), size, what, [((name, number), count) for (name, number), count in after])
        for (group, device), size, what, after in told
    ]


def faults_of_order(ranks: Sequence[Sequence[Launch]]) -> list[str]:
    """What would hang on real devices, a sentence each.

    A communicator takes part in one collective after the other, so all its ranks launch the same in the same order.
    Those of two communicators may be launched in any order, as their kernels run side by side; unless streams wait for
    each other so that, on all ranks together, each kernel waits for the other.

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
