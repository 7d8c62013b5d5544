"""What a gradient reducer tells the timeline: steps, backward passes, and each bucket's way."""

from __future__ import annotations

import time
from functools import partial

from spark_hvd.collectives.tracing import Tracing
from spark_hvd.timeline.recorder import BACKWARD, BUCKET_FILL, SHARED_MEMORY, STEP, WAIT, wire_phase
from spark_hvd.torch.optimizer.flat import FlatBucket

_ROW = "step"


class StepTrace:
    """Records one optimizer's steps; does nothing while no timeline is recorded."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._step_ns = 0
        self._backward_ns = 0
        self._launched_ns: dict[int, int] = {}

    @property
    def on(self) -> bool:
        """Whether a timeline is being recorded."""
        return self._tracing.recorder is not None

    def backward_began(self) -> None:
        """The first gradient of a backward pass has come."""
        if self.on:
            self._backward_ns = time.monotonic_ns()
            self._step_ns = self._step_ns or self._backward_ns

    def backward_ended(self) -> None:
        """The last gradient of a backward pass has come."""
        if self._backward_ns:
            self._span(_ROW, BACKWARD, self._backward_ns)
            self._backward_ns = 0

    def launched(self, number: int, bucket: FlatBucket, started_ns: int) -> None:
        """A bucket was filled from `started_ns` on, and its all-reduce has started now."""
        if not self.on:
            return
        now = time.monotonic_ns()
        self._span(f"bucket {number}", BUCKET_FILL, started_ns, bytes=bucket.nbytes, gradients=len(bucket.names))
        self._launched_ns[number] = now
        bucket.when_reduced(partial(self._reduced, number, bucket))

    def waited(self, buckets: list[FlatBucket], started_ns: int) -> None:
        """Since `started_ns` the step has waited for its buckets, and now all are there."""
        if not self.on:
            return
        self._span(_ROW, WAIT, started_ns)
        for number in list(self._launched_ns):  # those that cannot tell when they were
            self._reduced(number, buckets[number])

    def stepped(self) -> None:
        """An optimizer step has ended."""
        if self._step_ns:
            self._span(_ROW, STEP, self._step_ns)
        self._step_ns = time.monotonic_ns() if self.on else 0

    def _reduced(self, number: int, bucket: FlatBucket) -> None:
        launched_ns = self._launched_ns.pop(number, 0)
        if launched_ns:
            phase = SHARED_MEMORY if bucket.shared else wire_phase(bucket.backend, "allreduce")
            self._span(f"bucket {number}", phase, launched_ns)

    def _span(self, row: str, phase: str, start_ns: int, **facts: object) -> None:
        recorder = self._tracing.recorder
        if recorder is not None:
            recorder.span(row, phase, start_ns, time.monotonic_ns(), **facts)
