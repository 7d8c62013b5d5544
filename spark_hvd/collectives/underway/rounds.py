"""Calls of known names in memory that the ranks of one host share: taken up, waited for, or left to the coordinator.

A call waits in memory for a moment only. Then it goes to the coordinator, which knows who is missing, who has joined
and who has gone, and which has the other ranks do the same with that name. So whatever takes long is told, and fails,
as if there were no such memory.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import torch

from spark_hvd.collectives.underway.slots import RoundState, Slot, Slots
from spark_hvd.collectives.underway.use import SlotUse

_SLEEP_SECONDS = 0.01
"""How long to sleep before looking again, should nobody wake this rank."""
MEMORY_SECONDS = 0.1
"""How long to wait in memory."""


class MemoryWork(Protocol):
    """A rank's part of a call: one tensor, and one result, which is the same if it is in place; a barrier has none."""

    tensors: Sequence[torch.Tensor]
    in_place: bool
    results: list[torch.Tensor]


class MemoryCall(Protocol):
    """What rounds need of the handle of a call."""

    slot: Slot | None
    since: float
    """When it was called, on the monotonic clock."""

    @property
    def work(self) -> MemoryWork:
        """What goes in and comes out."""

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
        """The calls of these handles are over: free their names."""

    def withdrawn(self, handle: C_in) -> None:
        """The call of a handle is the coordinator's now."""

    def watch(self) -> None:
        """A call has begun: call :meth:`MemoryRounds.look` in :data:`MEMORY_SECONDS`, and as often as it says."""


class MemoryRounds(Generic[C]):
    """The calls of one queue that are in memory.

    Without slots no call is in memory. The lock is the queue's, held over all changes.
    """

    def __init__(self, slots: Slots | None, lock: threading.Lock, owner: RoundsOwner[C]) -> None:
        self._slots = slots
        self._lock = lock
        self._owner = owner
        # Those that have a slot, and will be copied into it together.
        self._to_come: list[tuple[Slot, C]] = []
        self._under_way: dict[Slot, C] = {}  # in the order of the calls
        self._watched = self._has_come = False

    @property
    def ids(self) -> int:
        """The numbers of the names that have a slot, as bits; the same on all ranks."""
        return 0 if self._slots is None else self._slots.ids

    @property
    def slots(self) -> Slots:
        """Those of the process set, which has some."""
        assert self._slots is not None
        return self._slots

    def learn(self, id: int, use: SlotUse | None) -> Slot | None:
        """The slot of a name that has a number; None: the coordinator has all its calls. Under the lock."""
        return None if self._slots is None else self._slots.learn(id, use)

    def has_run(self, ids: int) -> None:
        """The coordinator runs known names: their next calls are in memory."""
        if ids & self.ids:
            with self._lock:
                self.slots.has_run(ids)

    @property
    def under_way(self) -> list[C]:
        """The calls that are in memory."""
        return [*self._under_way.values()]

    def last(self, place: int) -> tuple[float, str] | None:
        """A rank's latest call in memory: when, on the monotonic clock, and its name."""
        return None if self._slots is None else self._slots.last(place)

    # ---- the user's threads ---------------------------------------------------------------------------------------

    def begin(self, handle: C, slot: Slot, *, urgent: bool) -> bool:
        """Take up a call; under the lock. ``slot`` is that of its name: open, and free.

        Returns:
            Whether :meth:`publish` is to be called in a moment.
        """
        slot.handle, handle.slot = handle, slot
        to_come = self._to_come
        to_come.append((slot, handle))
        if urgent:
            self._publish()
            return False
        return len(to_come) == 1

    def publish(self) -> None:
        """Show the other ranks what has been called in the last moment."""
        if self._to_come:
            with self._lock:
                self._publish()

    def _publish(self) -> None:
        calls = self._to_come
        if not calls:
            return
        self._to_come = []
        self.slots.come([(slot, _tensor_of(handle)) for slot, handle in calls], time.monotonic())
        self._under_way.update(calls)
        self._has_come = True
        if not self._watched:
            self._watched = True
            self._owner.watch()

    def meet(self, handle: C, timeout: float | None) -> None:
        """Wait for the end of a call, or leave it to the coordinator. A timeout of 0 only looks."""
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
            # Those that follow are waited for next, as a rule; to end them together costs less.
            if handle.done and (ended := self.slots.ended(self._under_way)):
                self._end(list(itertools.islice(self._under_way.items(), ended)))

    def _waited(self, handle: C, slot: Slot, limit: float) -> bool:
        """Wait for a round's end; returns whether it has ended."""
        slots, until = self.slots, time.monotonic() + limit

        def ended() -> bool:
            return slot.handle is not handle or handle.done or slots.state(slot) is not RoundState.WAITS

        if limit and slots.spin.sees(ended):
            return True
        while not ended():
            left = until - time.monotonic()
            if left <= 0:
                return False
            slots.sleep(slot, min(_SLEEP_SECONDS, left))
        return True

    def settle(self, handle: C) -> None:
        """End a call whose round has ended; under the lock."""
        self._publish()
        self._settle(handle, withdraw=False)

    def close(self, name: str) -> None:
        """The next call of this name is the coordinator's; under the lock."""
        self._publish()
        if self._slots is not None and (slot := self._slots.of(name)) is not None:
            self._slots.close(slot)

    # ---- the engine's thread --------------------------------------------------------------------------------------

    def look(self) -> float | None:
        """Leave to the coordinator what has waited for long, though nobody may wait for it here.

        Returns:
            In how many seconds to look again; None: not before :meth:`RoundsOwner.watch`.
        """
        with self._lock:
            self._publish()
            before = time.monotonic() - MEMORY_SECONDS
            for handle in list(self._under_way.values()):
                if handle.since > before:
                    break
                self._settle(handle, withdraw=True)
            self._watched, self._has_come = self._has_come or bool(self._under_way), False
            return MEMORY_SECONDS if self._watched else None

    def recall(self, ids: int) -> None:
        """Leave all that has not ended, and what comes next, to the coordinator; under the lock."""
        self._publish()
        for slot in self.slots.numbered(ids) if ids & self.ids else ():
            handle = self._under_way.get(slot)
            if handle is not None:
                self._settle(handle, withdraw=True)
            if slot.handle is None:
                self.slots.close(slot)

    def gone(self) -> None:
        """Nothing can begin any more: end what all ranks have come to, and let go of the rest; under the lock."""
        for handle in list(self._under_way.values()):
            self._settle(handle, withdraw=False)
        for slot, handle in [*self._under_way.items(), *self._to_come]:
            slot.handle = handle.slot = None
        self._under_way.clear()
        self._to_come.clear()

    # ---- both, under the lock -------------------------------------------------------------------------------------

    def _settle(self, handle: C, *, withdraw: bool) -> None:
        """End a call whose round has ended. With ``withdraw``, other ranks are not waited for any longer."""
        slot = handle.slot
        if slot is None:  # another thread has done so
            return
        withdrawn = withdraw and self.slots.close(slot)
        state = RoundState.WITHDRAWN if withdrawn else self.slots.state(slot)
        if state is RoundState.COMPLETE:
            self._end([(slot, handle)])
        elif state is RoundState.WITHDRAWN:
            if not withdrawn:
                self.slots.leave(slot)
            slot.handle = handle.slot = None
            del self._under_way[slot]
            self._owner.withdrawn(handle)

    def _end(self, calls: list[tuple[Slot, C]], *, kept: bool = True) -> None:
        """Give calls their results; `kept` as in :meth:`Slots.write_results`."""
        error = None
        try:
            self._give_results(calls, kept=kept)
        except RuntimeError as caught:  # such as for a tensor of torch.inference_mode(), outside of it
            if len(calls) > 1:  # of which it is one
                for call in calls:
                    self._end([call], kept=False)
                return
            error = caught
        under_way = self._under_way
        for slot, handle in calls:
            slot.handle = handle.slot = None
            del under_way[slot]
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
