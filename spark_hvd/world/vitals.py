"""What a rank tells whoever watches the run: how far it is, where its time goes, what it waits for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class Underway:
    """A collective that this rank has entered and that has not ended.

    Attributes:
        name: The same on all ranks: ``allreduce 'loss'``, ``bucket 2 of 5 of the gradients``.
        seconds: Since this rank entered it.
        ranks: Which take part; None for all.
    """

    name: str
    seconds: float
    ranks: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Vitals:
    """One rank at one moment. All counts and seconds but `clock` only grow within a process.

    Attributes:
        rank: In the world of `generation`.
        size: Of that world.
        generation: Of the world; -1 before the first.
        clock: Seconds on this process' own monotonic clock, for rates between two records.
        process: A name that no other process of the run has: ranks come and go, and numbers are given again.
        host: Where it runs, as the launcher knows the host.
        pid: The number of its process there.
        entered: Collectives entered so far.
        last: The name of the last one; "" before the first.
        last_seconds: Since then.
        underway: The oldest of those that have not ended, oldest first; eight at most.
        stage: Name of what is being gone through: "train", or what the user calls it; "" without `hvd.progress`.
        epoch: Number of the epoch, from 0; None if it was not told.
        epochs: How many there are to be; None if it was not told.
        step: Steps done in this epoch (or loop).
        steps: How many it has; None where that is not known.
        total_steps: Steps done by this process, in all epochs.
        steps_before: Those of them that it had done when the world of `generation` began.
        kept_steps: Steps that are in its last commit or in a checkpoint that it wrote, 0 if it only loaded one; None
            before the first.
        lost_steps: Steps that it has undone, to continue from an earlier commit.
        samples: Samples seen by this process; 0 where they cannot be counted.
        watched_seconds: Spent inside of `hvd.progress` loops.
        data_seconds: Of these, spent waiting for the next batch.
        comm_seconds: Spent waiting for communication.
        fetching: Whether the rank is waiting for a batch now, and since when, in seconds; None if it is not.
        metrics: The last values given to `hvd.progress`, by name.
        epochs_done: Of the epochs of the last seconds, each with "epoch", its number from 1: of an estimator's fit the
            means, on rank 0; else the last values given to the epoch's `hvd.progress` loops, those of a stage that is
            not "train" as "validation/loss".
        cpu_seconds: Processor time of the process, all of its threads.
        memory_bytes: Resident memory of the process.
        gpu_memory_bytes: Reserved by torch on the rank's GPUs; None without one.
        gpu_utilization: Of those GPUs, their mean, from 0 to 1; None where it cannot be told.
        stall_warning: Seconds after which a collective that does not end is worth a word; None: never.
        ended: Whether the rank's program has ended, or has left the world: there is no more to come of it.
    """

    rank: int
    size: int
    generation: int
    clock: float
    process: str = ""
    host: str = ""
    pid: int = 0
    entered: int = 0
    last: str = ""
    last_seconds: float = 0.0
    underway: tuple[Underway, ...] = ()
    stage: str = ""
    epoch: int | None = None
    epochs: int | None = None
    step: int = 0
    steps: int | None = None
    total_steps: int = 0
    steps_before: int = 0
    kept_steps: int | None = None
    lost_steps: int = 0
    samples: int = 0
    watched_seconds: float = 0.0
    data_seconds: float = 0.0
    comm_seconds: float = 0.0
    fetching: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    epochs_done: Sequence[Mapping[str, float]] = ()
    cpu_seconds: float = 0.0
    memory_bytes: int = 0
    gpu_memory_bytes: int | None = None
    gpu_utilization: float | None = None
    stall_warning: float | None = None
    ended: bool = False

    def to_message(self) -> dict[str, Any]:
        """Plain data that JSON can carry."""
        return asdict(self)

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Vitals:
        """The record that :meth:`to_message` made; fields that a newer sender has besides are left out."""
        known = {each.name: message[each.name] for each in fields(cls) if each.name in message}
        known["underway"] = tuple(
            Underway(each["name"], each["seconds"], None if each["ranks"] is None else tuple(each["ranks"]))
            for each in known.get("underway", ())
        )
        return cls(**known)
