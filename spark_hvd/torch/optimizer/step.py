"""Takes a step through a gradient reducer's buckets: launches them in plan order, waits, and makes gradients of sums.

It also records steps in the timeline.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from spark_hvd.collectives.tracing import Tracing
from spark_hvd.context.global_state import refuse_fork
from spark_hvd.timeline.recorder import BACKWARD, BUCKET_FILL, SHARED_MEMORY, STEP, WAIT, wire_phase
from spark_hvd.torch.optimizer.flat import FlatBucket, Reduction
from spark_hvd.torch.optimizer.participation import EVERYONE, Participation, Presence, correction_on_device
from spark_hvd.torch.optimizer.sparse import reduce_sparse
from spark_hvd.transport.exchange import all_gather, exchange
from spark_hvd.transport.handles import is_out_of_memory
from spark_hvd.world.activity import activity
from spark_hvd.world.errors import CollectiveError
from spark_hvd.world.vitals import PendingCollective


class BucketPipeline:
    """Runs the collectives of one reducer's steps.

    The list of ``buckets`` may grow. ``failed`` is a bound method, which is held weakly and called when a collective
    has failed.
    """

    def __init__(
        self,
        buckets: Sequence[FlatBucket],
        reduction: Reduction,
        group: dist.ProcessGroup,
        device: torch.device,
        trace: StepTrace,
        failed: Callable[[], None],
    ) -> None:
        self._buckets = buckets
        self._reduction = reduction
        self._device = device
        self._trace = trace
        self._failed = weakref.WeakMethod(failed)
        self._collective = _Collective(self)
        self.group = group
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self.launched = 0
        """Buckets launched so far in this step."""
        self.must_look = False
        """Whether the host must learn the participation, even if it has to wait for the device."""
        self.participation = EVERYONE
        """Which ranks have taken part, as far as the host knows."""
        self._correction: float | torch.Tensor = 1.0
        self._ended = 0
        self._since: list[float] = []  # when each bucket of this step was launched

    @property
    def in_flight(self) -> bool:
        """Whether an all-reduce is in flight that nobody has waited for."""
        return any(bucket.in_flight for bucket in self._buckets)

    def pending(self, now: float) -> list[PendingCollective]:
        """Yield the buckets that were launched and have not been waited for; from any thread."""
        return [
            PendingCollective(f"bucket {number} of the gradients", now - since, self.ranks)
            for number, since in enumerate(self._since.copy())
            if number >= self._ended
        ]

    def reset(self) -> None:
        """Begin a new step."""
        for bucket in self._buckets:
            bucket.rearm()
        self.launched = self._ended = 0
        self._since.clear()

    def launch_next(self, presence: Presence) -> None:
        """Fill the next bucket and start its all-reduce."""
        bucket = self._buckets[self.launched]
        started_ns = time.monotonic_ns()
        bucket.fill(presence)
        self._since.append(activity.enter("bucket", str(self.launched), "of the gradients"))
        with self._collective:
            bucket.launch(self.group)
            self._trace.launched(self.launched, bucket, started_ns)
            all(earlier.poll() for earlier in self._buckets[: self.launched])  # in order, up to the first not ready
        self.launched += 1

    def launch_rest(self, presence: Presence) -> None:
        """Launch all buckets that are not launched yet."""
        while self.launched < len(self._buckets):
            self.launch_next(presence)

    def finish(self, first: int, sparse: Sequence[torch.nn.Parameter], presence: Presence) -> None:
        """Wait for the launched buckets, reduce sparse gradients, and turn all results into gradients."""
        if first == 0:
            self.participation, self._correction = EVERYONE, 1.0
        if sparse:
            with activity.waiting("sparse gradients"):
                self._take(reduce_sparse(sparse, presence, self._sparse_scale_for, self._all_gather))
        with self._collective:
            for bucket in self._buckets[first:]:
                bucket.advance()
        for number in range(first, len(self._buckets)):
            bucket = self._buckets[number]
            with self._collective:
                bucket.wait()
            self._ended += 1
            bucket.receive()
            if number == 0 and not sparse:
                self._learn_participation(bucket, presence)
            elif (not bucket.on_gpu or bucket.misfits) and bucket.tells_of_misfits:
                self.participation = replace(self.participation, newcomers=True)
            bucket.complete(self._correction)

    def _learn_participation(self, first: FlatBucket, presence: Presence) -> None:
        """Find out which ranks have taken part."""
        # The host would have to wait for a device. So with a device, it reads only if it expects news.
        if not first.on_gpu or self.must_look or presence is not Presence.HERE or first.misfits:
            self._take(Participation.read(first.notes))
        elif self._reduction.average:
            self._correction = correction_on_device(first.notes, self._reduction.size)

    def _take(self, participation: Participation) -> None:
        self.participation = participation
        self._correction = self._correction_for(participation)

    def _correction_for(self, participation: Participation) -> float:
        return participation.correction(self._reduction.size) if self._reduction.average else 1.0

    def _sparse_scale_for(self, participation: Participation) -> float:
        mean = 1.0 / self._reduction.size if self._reduction.average else 1.0
        return mean * self._correction_for(participation)

    # ---- facts ----------------------------------------------------------------------------------------------------

    def exchange(self, fact: Any) -> list[Any]:
        """Return the facts of all ranks, in rank order."""
        with self._collective:
            return exchange(fact, self.group, self._device, "facts about the gradients")

    def gather_facts(self, fact: dict[str, Any], presence: Presence) -> list[dict[str, Any]]:
        """Gather the facts of the ranks that make this step, each with its `rank`."""
        rows = self.exchange([presence, fact])
        self.participation = Participation.of([presence for presence, _ in rows])
        return [
            fact | {"rank": rank}
            for rank, (presence, fact) in zip(self.ranks, rows, strict=True)
            if presence < Presence.JOINED
        ]

    def _all_gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        with self._collective:
            return all_gather(mine, self.group)

    def _give_up(self, error: RuntimeError) -> None:
        for bucket in self._buckets:
            bucket.abandon()
        failed = self._failed()
        if failed is not None:
            failed()
        if not is_out_of_memory(error):
            raise CollectiveError(f"reducing gradients failed because a peer or the network did: {error}") from error


class _Collective:
    """A context in which a collective runs; a class, because a generator would cost small models too much."""

    __slots__ = ("_pipeline",)

    def __init__(self, pipeline: BucketPipeline) -> None:
        self._pipeline = weakref.ref(pipeline)

    def __enter__(self) -> None:
        refuse_fork()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, RuntimeError):
            pipeline = self._pipeline()
            assert pipeline is not None
            pipeline._give_up(error)


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
        """Record the first gradient of a backward pass."""
        if self.on:
            self._backward_ns = time.monotonic_ns()
            self._step_ns = self._step_ns or self._backward_ns

    def backward_ended(self) -> None:
        """Record the last gradient of a backward pass."""
        if self._backward_ns:
            self._span(_ROW, BACKWARD, self._backward_ns)
            self._backward_ns = 0

    def launched(self, number: int, bucket: FlatBucket, started_ns: int) -> None:
        """Record that a bucket was filled from `started_ns` on, and that its all-reduce starts now."""
        if not self.on:
            return
        now = time.monotonic_ns()
        self._span(f"bucket {number}", BUCKET_FILL, started_ns, bytes=bucket.nbytes, gradients=len(bucket.names))
        self._launched_ns[number] = now
        bucket.when_reduced(partial(self._reduced, number, bucket))

    def waited(self, buckets: list[FlatBucket], started_ns: int) -> None:
        """Record that the step has waited for its buckets since `started_ns`, and that all have arrived."""
        if not self.on:
            return
        self._span(_ROW, WAIT, started_ns)
        for number in list(self._launched_ns):  # buckets that cannot tell when they were reduced
            self._reduced(number, buckets[number])

    def stepped(self) -> None:
        """Record the end of an optimizer step."""
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
