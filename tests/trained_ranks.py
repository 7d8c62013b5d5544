"""Ranks that train on a clock that the test controls, and report to a view of their run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from spark_hvd.runner.watch.view import RunView
from spark_hvd.world.vitals import Vitals


class Training:
    """Ranks that train together, and report once a second, on a clock that the test controls.

    Args:
        size: Number of ranks.
        step_seconds: Seconds of a step on every rank, because ranks wait for each other.
        steps: Number of steps in an epoch.
        epochs: Number of epochs.
        comm: Share of the time that each rank waits for communication.
        data: Share of the time that each rank waits for data.
        changes: Changes to the record of each rank.
    """

    def __init__(
        self,
        size: int = 4,
        step_seconds: float = 0.1,
        steps: int | None = 100,
        epochs: int | None = 10,
        comm: Callable[[int], float] = lambda rank: 0.2,
        data: Callable[[int], float] = lambda rank: 0.1,
        changes: Callable[[int], dict[str, Any]] = lambda rank: {},
    ) -> None:
        self.size, self.step_seconds, self.steps, self.epochs = size, step_seconds, steps, epochs
        self.comm, self.data, self.changes = comm, data, changes
        self.view = RunView(f"train on {size} ranks", size, 0.0)
        self.now = 0.0
        self.generation = 0
        self.work = dict.fromkeys(range(size), 0.0)  # seconds that each process has worked
        self.process = {rank: f"process {rank}" for rank in range(size)}
        self.still = False
        self._entered: dict[str, tuple[int, int, int]] = {}  # of each process: its generation, steps before it, all

    def record(self, rank: int) -> Vitals:
        seconds = self.work[rank]
        done = int(seconds / self.step_seconds + 1e-9)
        length = self.steps or 10**9
        generation, before, told = self._entered.get(self.process[rank], (self.generation, 0, 0))
        before = before if generation == self.generation else told
        self._entered[self.process[rank]] = self.generation, before, done
        record = Vitals(
            rank=rank,
            size=self.size,
            generation=self.generation,
            clock=5000.0 * rank + self.now,
            process=self.process[rank],
            entered=done,
            stage="train",
            epoch=None if self.epochs is None else done // length,
            epochs=self.epochs,
            step=done % length,
            steps=self.steps,
            total_steps=done,
            steps_before=before,
            samples=done * 32,
            watched_seconds=seconds,
            data_seconds=seconds * self.data(rank),
            comm_seconds=seconds * self.comm(rank),
            metrics={"accuracy": 0.9, "loss": 1 / (1 + seconds)},
            cpu_seconds=3 + 1.5 * seconds,
            memory_bytes=500 << 20,
        )
        return replace(record, **self.changes(rank))

    def renew(self, *ranks: int) -> None:
        """Replace the processes of these ranks by new ones."""
        for rank in ranks:
            self.work[rank], self.process[rank] = 0.0, f"process {rank}, begun at {self.now}"

    def go_on(self, seconds: float, ranks: range | None = None) -> None:
        for _ in range(round(seconds)):
            self.now += 1.0
            for rank in ranks or range(self.size):
                if not self.still:
                    self.work[rank] += 1.0
                self.view.take(self.record(rank), self.now)


def trained(seconds: int = 40, size: int = 2, **facts: Any) -> RunView:
    """Return the view of ranks that have trained for some time. Rank 1 waits least; ``facts`` apply to all."""
    view = RunView(f"train on {size} ranks", size, 0.0)
    for second in range(1, seconds + 1):
        for rank in range(size):
            view.take(record(rank, size, second, **facts), float(second))
    return view


def record(rank: int, size: int, second: int, **facts: Any) -> Vitals:
    """Return the record that such a rank sends in this second."""
    known: dict[str, Any] = {
        "generation": 0,
        "clock": float(second),
        "entered": second,
        "stage": "train",
        "epoch": second // 50,
        "epochs": 4,
        "step": second % 50,
        "steps": 50,
        "total_steps": second,
        "samples": 32 * second,
        "watched_seconds": float(second),
        "data_seconds": 0.1 * second,
        "comm_seconds": (0.05 if rank == 1 else 0.4) * second,
        "metrics": {"loss": 1 / second},
        "cpu_seconds": float(second),
        "memory_bytes": 600 << 20,
    }
    return Vitals(rank=rank, size=size, **{**known, **facts})
