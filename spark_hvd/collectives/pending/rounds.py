"""Calls of known names in memory that the ranks of one host share, without messages.

Each known name has a slot in that memory, and each call of the name is a round of its slot; `slots` has the protocol. A
call is begun, then published: it is copied into the memory, together with other calls of the same moment. It ends once
all ranks have entered its round.

A call waits in memory for a moment only. Then this rank withdraws it and passes it to the coordinator, which knows
which ranks are missing, have joined or are gone. The coordinator then takes over the other ranks' calls of that name,
too. So slow calls are reported, and fail, as if there were no such memory.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import torch

from spark_hvd.collectives.pending.slots import RoundState, Slot, Slots
from spark_hvd.collectives.pending.use import SlotUse

_SLEEP_SECONDS = 0.01
"""How long to sleep before checking again, in case nobody wakes this rank."""
MEMORY_SECONDS = 0.1
"""How long to wait in memory before a call moves to the coordinator."""


class MemoryWork(Protocol):
    """A rank's part of a call: one tensor and one result, which is the same tensor if in place; none for a barrier."""

    tensors: Sequence[torch.Tensor]
    in_place: bool
    results: list[torch.Tensor]


class MemoryCall(Protocol):
    """What rounds need of the handle of a call."""

    slot: Slot | None
    since: float
    """Time of the call, on the monotonic clock."""

    @property
    def work(self) -> MemoryWork:
        """The input and the output of the call."""

    @property
    def done(self) -> bool:
        """Whether the call has ended."""

    def complete(self, *, error: Exception | None = None) -> None:
        """End the call, with an error or with its results in place."""


C = TypeVar("C", bound=MemoryCall)
C_in = TypeVar("C_in", bound=MemoryCall, contravariant=True)


class RoundsOwner(Protocol[C_in]):
    """The queue whose calls go through memory; all methods are called under its lock."""

    def forget(self, handles: Sequence[C_in]) -> None:
        """Free the names of these handles, whose calls have ended."""

    def withdrawn(self, handle: C_in) -> None:
        """Pass the call of a handle to the coordinator."""

    def watch(self) -> None:
        """Call :meth:`MemoryRounds.check` in :data:`MEMORY_SECONDS`, and then as often as it says: a call has begun."""


class MemoryRounds(Generic[C]):
    """The calls of one queue that are in memory.

    Without slots, no call is in memory. The lock is the queue's, and is held during all changes.
    """

    def __init__(self, slots: Slots | None, lock: threading.Lock, owner: RoundsOwner[C]) -> None:
        self._slots = slots
        self._lock = lock
        self._owner = owner
        self._unpublished: list[tuple[Slot, C]] = []
        self._in_flight: dict[Slot, C] = {}
        """The published calls, in their order."""
        self._watched = False
        """Whether the engine's thread will call :meth:`check` again."""
        self._published_since_check = False

    @property
    def ids(self) -> int:
        """The numbers of the names that have a slot, as bits; the same on all ranks."""
        return 0 if self._slots is None else self._slots.ids

    @property
    def slots(self) -> Slots:
        """The slots of the process set, which must have some."""
        assert self._slots is not None
        return self._slots

    def learn(self, id: int, use: SlotUse | None) -> Slot | None:
        """Return the slot of a name that has a number; None: all its calls go to the coordinator. Under the lock."""
        return None if self._slots is None else self._slots.learn(id, use)

    def has_run(self, ids: int) -> None:
        """Let the next calls of these known names use memory: the coordinator has run them."""
        if ids & self.ids:
            with self._lock:
                self.slots.has_run(ids)

    @property
    def in_flight(self) -> list[C]:
        """The calls that are in memory."""
        return [*self._in_flight.values()]

    def last(self, place: int) -> tuple[float, str] | None:
        """Return when a rank made its latest call in memory, on the monotonic clock, and that call's name."""
        return None if self._slots is None else self._slots.last(place)

    # ---- the user's threads ---------------------------------------------------------------------------------------

    def begin(self, handle: C, slot: Slot, *, urgent: bool) -> bool:
        """Begin a call; under the lock. ``slot`` belongs to its name, and is open and free.

        Returns:
            Whether to call :meth:`publish` in a moment.
        """
        slot.handle, handle.slot = handle, slot
        unpublished = self._unpublished
        unpublished.append((slot, handle))
        if urgent:
            self._publish()
            return False
        return len(unpublished) == 1

    def publish(self) -> None:
        """Publish the calls of the last moment to the other ranks."""
        if self._unpublished:  # read without the lock, to save taking it; _publish looks again
            with self._lock:
                self._publish()

    def _publish(self) -> None:
        """Do :meth:`publish` under the lock."""
        calls = self._unpublished
        if not calls:
            return
        self._unpublished = []
        self.slots.enter([(slot, _tensor_of(handle)) for slot, handle in calls], time.monotonic())
        self._in_flight.update(calls)
        self._published_since_check = True
        if not self._watched:
            self._watched = True
            self._owner.watch()

    def wait_for(self, handle: C, timeout: float | None) -> None:
        """Wait for the end of a call, or move it to the coordinator. A timeout of 0 only checks."""
        self.publish()
        slot = handle.slot
        if slot is None:
            return
        limit = MEMORY_SECONDS if timeout is None else min(timeout, MEMORY_SECONDS)
        late = self.slots.state(slot) is RoundState.WAITS and not self._waited(handle, slot, limit)
        if late and limit < MEMORY_SECONDS:
            late = time.monotonic() - handle.since > MEMORY_SECONDS
        with self._lock:
            self._settle(handle, withdraw=late)
            # As a rule, the following calls are waited for next, and ending them together costs less.
            if handle.done and (ended := self.slots.ended(self._in_flight)):
                self._end(list(itertools.islice(self._in_flight.items(), ended)))

    def _waited(self, handle: C, slot: Slot, limit: float) -> bool:
        """Wait for the end of a round; return whether it has ended."""
        slots, until = self.slots, time.monotonic() + limit

        def ended() -> bool:
            return slot.handle is not handle or handle.done or slots.state(slot) is not RoundState.WAITS

        if limit and slots.spin.until(ended):
            return True
        while not ended():
            left = until - time.monotonic()
            if left <= 0:
                return False
            slots.sleep(slot, min(_SLEEP_SECONDS, left))
        return True

    def settle(self, handle: C) -> None:
        """End a call if its round has ended; under the lock."""
        self._publish()
        self._settle(handle, withdraw=False)

    def close(self, name: str) -> None:
        """Send the next call of this name to the coordinator; under the lock."""
        self._publish()
        if self._slots is not None and (slot := self._slots.of(name)) is not None:
            self._slots.close(slot)

    # ---- the engine's thread --------------------------------------------------------------------------------------

    def check(self) -> float | None:
        """Move calls that have waited long to the coordinator, even if no thread waits for them here.

        Returns:
            Seconds until the next check; None: not before :meth:`RoundsOwner.watch`.
        """
        with self._lock:
            self._publish()
            before = time.monotonic() - MEMORY_SECONDS
            for handle in list(self._in_flight.values()):
                if handle.since > before:
                    break  # the following calls are younger still
                self._settle(handle, withdraw=True)
            # Check once more after the last call, so that a busy queue does not start the watch at each call.
            self._watched = self._published_since_check or bool(self._in_flight)
            self._published_since_check = False
            return MEMORY_SECONDS if self._watched else None

    def recall(self, ids: int) -> None:
        """Move these names' unfinished and next calls to the coordinator; under the lock."""
        self._publish()
        for slot in self.slots.numbered(ids) if ids & self.ids else ():
            handle = self._in_flight.get(slot)
            if handle is not None:
                self._settle(handle, withdraw=True)
            if slot.handle is None:
                self.slots.close(slot)

    def abandon(self) -> None:
        """Begin nothing more. End the rounds that all ranks have entered, and drop the rest; under the lock."""
        for handle in list(self._in_flight.values()):
            self._settle(handle, withdraw=False)
        for slot, handle in [*self._in_flight.items(), *self._unpublished]:
            slot.handle = handle.slot = None
        self._in_flight.clear()
        self._unpublished.clear()

    # ---- both, under the lock -------------------------------------------------------------------------------------

    def _settle(self, handle: C, *, withdraw: bool) -> None:
        """End a call if its round has ended. With ``withdraw``, stop waiting for other ranks."""
        slot = handle.slot
        if slot is None:  # another thread has ended it
            return
        # close() does not withdraw if no rank is missing: then the round is about to complete.
        withdrawn = withdraw and self.slots.close(slot)
        state = RoundState.WITHDRAWN if withdrawn else self.slots.state(slot)
        if state is RoundState.COMPLETE:
            self._end([(slot, handle)])
        elif state is RoundState.WITHDRAWN:
            if not withdrawn:
                self.slots.leave(slot)
            slot.handle = handle.slot = None
            del self._in_flight[slot]
            self._owner.withdrawn(handle)

    def _end(self, calls: list[tuple[Slot, C]], *, kept: bool = True) -> None:
        """Give calls their results; `kept` is that of :meth:`Slots.write_results`."""
        error = None
        try:
            self._give_results(calls, kept=kept)
        except RuntimeError as caught:  # such as for a tensor of torch.inference_mode(), used outside it
            if len(calls) > 1:  # end them one by one, so that only the call at fault gets the error
                for call in calls:
                    self._end([call], kept=False)
                return
            error = caught
        in_flight = self._in_flight
        for slot, handle in calls:
            slot.handle = handle.slot = None
            del in_flight[slot]
            handle.complete(error=error)
        self._owner.forget([handle for _, handle in calls])

    def _give_results(self, calls: list[tuple[Slot, C]], *, kept: bool) -> None:
        into = [(slot, _tensor_of(handle)) for slot, handle in calls if handle.work.in_place]
        if into:
            self.slots.write_results(into, kept=kept)
        if len(into) < len(calls):
            rest = [(slot, handle.work) for slot, handle in calls if not handle.work.in_place]
            for (_, work), result in zip(rest, self.slots.results([slot for slot, _ in rest]), strict=True):
                work.results = [result]


_NOTHING = torch.empty(0, device="cpu")


def _tensor_of(handle: MemoryCall) -> torch.Tensor:
    tensors = handle.work.tensors
    return tensors[0] if tensors else _NOTHING
