"""Runs batches on one rank in the coordinator's order, without waiting for any; on the engine's thread only.

Tensors on a GPU are packed and unpacked on a stream of the queue, after everything that the caller's stream had queued
before the call. A point on that stream stands for the result, so no thread waits for the device.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from spark_hvd.collectives.execution import Execution, Work, rounds, run
from spark_hvd.collectives.fusion import Batch
from spark_hvd.collectives.handle import NamedHandle, StreamEvent
from spark_hvd.collectives.members import Members
from spark_hvd.collectives.tracing import Tracing
from spark_hvd.transport.handles import is_out_of_memory
from spark_hvd.transport.host.sliced import SlicedSum
from spark_hvd.world.errors import CollectiveError


@dataclass(slots=True, eq=False)
class _Started:
    """A batch that has been started, and the handles of this rank in it."""

    number: int
    batch: Batch
    execution: Execution
    handles: list[NamedHandle[Any]]
    queued_ns: int
    started_ns: int
    packed_ns: int = field(default_factory=time.monotonic_ns)
    round_over: bool = False


class Runs:
    """The batches that this rank has begun, in order.

    ``release`` gets the handles whose collective has ended, before they are completed, from any thread.
    """

    def __init__(
        self,
        members: Members,
        tracing: Tracing,
        release: Callable[[Sequence[NamedHandle[Any]]], None],
        cannot_run: Callable[[str], None],
    ) -> None:
        self._members = members
        self._tracing = tracing
        self._release = release
        self._cannot_run = cannot_run
        self._queue: deque[tuple[Batch, list[NamedHandle[Any] | None], int]] = deque()
        self.begun = 0
        """Number of batches that this rank has begun, including those that have ended."""
        self._started: dict[int, _Started] = {}  # by number, in the order of all batches
        self._active: _Started | None = None
        self._in_flight: set[NamedHandle[Any]] = set()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self.device: torch.device | None = None
        """The GPU on which a rank that has joined contributes; None if it has used none."""

    def start(self, batches: Sequence[Batch], handles: Mapping[str, NamedHandle[Any]]) -> None:
        """Run batches after all earlier ones. For entries without a handle, contribute neutral elements."""
        now = time.monotonic_ns()
        for batch in batches:
            given = [handles.get(entry.name) for entry in batch]
            # A call of a rank that has joined may still be in flight when the others call its name again.
            mine = [None if handle in self._in_flight else handle for handle in given]
            self._in_flight.update(handle for handle in mine if handle is not None)
            self._queue.append((batch, mine, now))
        self._pump()

    def has(self, handle: NamedHandle[Any]) -> bool:
        """Return whether the call is queued or started, and has not ended."""
        return handle in self._in_flight

    @property
    def done(self) -> int:
        """Number of batches to which this rank has contributed; all ranks count alike."""
        return self.begun - (self._active is not None)

    @property
    def unfinished(self) -> bool:
        """Whether collectives are in flight on the wire; from any thread."""
        active = self._active
        return any(not (started is active and started.round_over) for started in [*self._started.values()])

    def abandon(self, done: int) -> list[NamedHandle[Any]]:
        """Start nothing beyond the first `done` batches, and return the handles of later ones."""
        later = [started for number, started in [*self._started.items()] if number >= done]
        handles = [handle for started in later for handle in started.handles]
        while self._queue and self.begun + len(self._queue) > done:
            _, mine, _ = self._queue.pop()
            handles += [handle for handle in mine if handle is not None]
        return handles

    def resume(self) -> None:
        """Continue the batch of several rounds, if its round has ended."""
        active = self._active
        if active is None or not active.round_over:
            return
        self._active = None
        try:
            active.execution.resume()
        except CollectiveError as error:  # a peer's fault, not this rank's: the waiting thread learns whose
            active.execution.fail(error)
            self._ended(active)
        except Exception as error:
            self._started.pop(active.number, None)
            self._fail(active.handles, error)
        else:
            self._continue(active)
        self._pump()

    def _pump(self) -> None:
        while self._queue and self._active is None:
            batch, mine, queued_ns = self._queue.popleft()
            number, self.begun = self.begun, self.begun + 1
            handles = [handle for handle in mine if handle is not None]
            works = [None if handle is None else handle.work for handle in mine]
            started_ns = time.monotonic_ns()
            try:
                if batch[0].request.on_gpu:
                    self._run_on_gpu(number, batch, works, handles, queued_ns)
                    continue
                steps = run(batch, works, self._members)
                started = _Started(number, batch, Execution(steps), handles, queued_ns, started_ns)
                self._started[number] = started
                if rounds(batch, self._members) or started.execution.waiting_for is None:
                    self._continue(started)
                else:
                    started.execution.waiting_for.when_done(partial(self._only_round_is_over, started))
            except Exception as error:
                self._started.pop(number, None)
                self._fail(handles, error)

    def _continue(self, started: _Started) -> None:
        """Continue with a batch of several rounds, which has begun another round or has ended."""
        if started.execution.waiting_for is None:
            self._ended(started)
        else:
            self._active = started
            started.round_over = False
            started.execution.waiting_for.when_done(partial(self._round_is_over, started))

    def _only_round_is_over(self, started: _Started) -> None:
        sum_ = started.execution.waiting_for
        fault = sum_.fault() if isinstance(sum_, SlicedSum) else None  # no other handle runs this rank's code elsewhere
        if fault is None:
            self._ended(started)
        else:
            self._started.pop(started.number, None)
            self._fail(started.handles, fault)

    def _round_is_over(self, started: _Started) -> None:
        # Gloo calls back shortly before it marks its work as done, so do not ask the handle again.
        started.round_over = True
        self._tracing.wake()

    def _run_on_gpu(
        self, number: int, batch: Batch, works: Sequence[Work | None], handles: list[NamedHandle[Any]], queued_ns: int
    ) -> None:
        started_ns = time.monotonic_ns()
        device = self._device_of(batch, handles)
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):  # its device is the current one in here
            for handle in handles:
                assert handle.ready is not None
                handle.ready.wait([*handle.work.tensors])
            execution = Execution(run(batch, works, self._members, device))
            packed = _Started(number, batch, execution, handles, queued_ns, started_ns)
            execution.finish()  # orders the stream; the host does not wait
            event = StreamEvent.now(device)
        self._ended(packed, event)

    def _device_of(self, batch: Batch, handles: Sequence[NamedHandle[Any]]) -> torch.device:
        """Return the device on which a batch runs on this rank."""
        devices = sorted({str(tensor.device) for handle in handles for tensor in handle.work.tensors})
        if len(devices) > 1:
            raise ValueError(
                f"{', '.join(handle.label for handle in handles)} are sent together, because the tensors of rank "
                f"{self._members.ranks[0]} are on one GPU; on this rank they are on {', '.join(devices)}. "
                "Put the tensors of these names on one GPU on every rank, or wait for each call before the next"
            )
        # This thread's current device is CUDA's first, which may belong to another rank.
        return torch.device(devices[0]) if devices else self.device or torch.device("cuda", torch.cuda.current_device())

    def _ended(self, started: _Started, event: StreamEvent | None = None) -> None:
        """Complete the handles of a batch whose collectives have ended or failed; from any thread."""
        if self._tracing.recorder is not None:
            staging = self._members.staging
            staged = staging is not None and staging.serves(started.batch)
            self._tracing.ran(started.handles, started.queued_ns, started.started_ns, started.packed_ns, staged)
        self._started.pop(started.number, None)
        self._release(started.handles)  # first: a handle that is neither in flight nor released would be started again
        self._in_flight.difference_update(started.handles)
        for handle in started.handles:
            handle.complete(event or started.execution)

    def _fail(self, handles: list[NamedHandle[Any]], error: Exception) -> None:
        """Fail these handles and leave the world: the other ranks must not wait for this one."""
        text = f"{type(error).__name__}: {error}"
        self._cannot_run(text)
        self._release(handles)
        self._in_flight.difference_update(handles)
        me = self._members.ranks[self._members.place]
        for handle in handles:
            fault: Exception = error
            if not is_out_of_memory(error):
                fault = CollectiveError(f"{handle.label} failed: rank {me} could not do its part: {text}")
                fault.__cause__ = error
            handle.complete(error=fault)
