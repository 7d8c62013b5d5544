"""What a rank did between two of its records: speed, and where its time went."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from spark_hvd.world.vitals import Vitals

GROWING = ("clock", "total_steps", "samples", "watched_seconds", "data_seconds", "comm_seconds", "cpu_seconds")
"""Fields of Vitals that only grow while a process lives."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What a rank did in some time.

    Attributes:
        seconds: That time, on the rank's clock.
        samples_per_second: 0 where samples are not counted.
        steps_per_second: Steps of `hvd.progress`.
        data: The part of the time, 0 to 1, in which it waited for its data.
        communication: The part in which it waited for communication.
        compute: The rest of the time inside of `hvd.progress` loops; what is missing to 1 was spent outside of them.
        cpu: Cores that it kept busy.
    """

    seconds: float
    samples_per_second: float
    steps_per_second: float
    data: float
    communication: float
    compute: float
    cpu: float


def grown(before: Vitals, after: Vitals) -> dict[str, float] | None:
    """By how much each of `GROWING` has grown; None if the records are not of one process in one world."""
    if before.generation not in (after.generation, -1):  # -1: before its first world
        return None
    found = {name: float(getattr(after, name) - getattr(before, name)) for name in GROWING}
    return found if min(found.values()) >= 0 else None


def rates(differences: Mapping[str, float] | None) -> Rates | None:
    """What a rank did while its counters grew by `differences`; None where these tell nothing.

    Args:
        differences: Of `GROWING`, as :func:`grown` gives them.
    """
    if differences is None or differences["clock"] <= 0:
        return None
    seconds = differences["clock"]
    watched = min(differences["watched_seconds"], seconds)
    data = min(differences["data_seconds"], watched)
    communication = min(differences["comm_seconds"], seconds - data)
    return Rates(
        seconds=seconds,
        samples_per_second=differences["samples"] / seconds,
        steps_per_second=differences["total_steps"] / seconds,
        data=data / seconds,
        communication=communication / seconds,
        compute=max(0.0, watched - data - communication) / seconds,
        cpu=differences["cpu_seconds"] / seconds,
    )
