"""What a rank reports to whoever watches the run: its progress, where its time goes, and what it waits for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class PendingCollective:
    """A collective that this rank has entered and that has not ended.

    Attributes:
        name: The same on all ranks: ``allreduce 'loss'``, ``bucket 2 of 5 of the gradients``.
        seconds: Since this rank entered it.
        ranks: The ranks that take part; None for all.
    """

    name: str
    seconds: float
    ranks: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Vitals:
    """The state of one rank at one moment. Within a process, all counts and seconds except `clock` only grow.

    Attributes:
        rank: Rank in the world of `generation`.
        size: Size of that world.
        generation: Generation of the world; -1 before the first.
        clock: Seconds on this process's own monotonic clock, for rates between two records.
        process: A name that is unique within the run: ranks come and go, and their numbers are reused.
        host: The host, as the launcher knows it.
        pid: Process id on that host.
        entered: Collectives entered so far.
        last: Name of the last one; "" before the first.
        last_seconds: Seconds since then.
        pending: The oldest collectives that have not ended, oldest first; eight at most.
        stage: "train", or the user's name for the stage; "" without `hvd.progress`.
        epoch: Number of the epoch, from 0; None if unknown.
        epochs: Number of epochs; None if unknown.
        step: Steps done in this epoch (or loop).
        steps: Steps in this epoch; None if unknown.
        total_steps: Steps done by this process, in all epochs.
        steps_before: Steps that it had done when the world of `generation` began.
        kept_steps: Steps that are in its last commit or in a checkpoint that it wrote, 0 if it only loaded one; None
            before the first.
        lost_steps: Steps that it has undone, to continue from an earlier commit.
        samples: Samples seen by this process; 0 where they cannot be counted.
        watched_seconds: Seconds spent inside `hvd.progress` loops.
        data_seconds: Of these, seconds spent waiting for the next batch.
        comm_seconds: Seconds spent waiting for communication.
        fetching: Seconds for which the rank has been waiting for a batch; None if it is not waiting.
        metrics: The last values given to `hvd.progress`, by name.
        epochs_done: The epochs of the last seconds, each with "epoch", its number from 1. In an estimator's fit they
            hold the means, on rank 0; otherwise the last values given to the epoch's `hvd.progress` loops, where those
            of a stage other than "train" have names such as "validation/loss".
        cpu_seconds: Processor time of the process, all threads.
        memory_bytes: Resident memory of the process.
        gpu_memory_bytes: Memory reserved by torch on the rank's GPUs; None without a GPU.
        gpu_utilization: Mean over those GPUs, from 0 to 1; None if unknown.
        stall_warning: Seconds after which a collective that has not ended deserves a warning; None: never.
        ended: Whether the rank's program has ended or has left the world, so that no more records follow.
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
    pending: tuple[PendingCollective, ...] = ()
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
        """Return plain data that JSON can carry."""
        return asdict(self)

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Vitals:
        """Rebuild the record from :meth:`to_message`; unknown fields of a newer sender are dropped."""
        known = {each.name: message[each.name] for each in fields(cls) if each.name in message}
        known["pending"] = tuple(
            PendingCollective(each["name"], each["seconds"], None if each["ranks"] is None else tuple(each["ranks"]))
            for each in known.get("pending", ())
        )
        return cls(**known)
