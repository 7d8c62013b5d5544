"""Small calls under known names among ranks of one host, in memory that all of them map, without messages.

Each name has a slot, which holds a word and two copies of the data for every rank; the copies take turns. A call copies
its tensor into its rank's copy and sets its rank's word to the number of the round. A thread that waits for the result
watches until all words have reached the round, then computes the result from all copies, in rank order. Slots are
independent, so ranks need not call names in the same order.

A round ends in memory on all ranks, or through the coordinator on all of them. A rank that will not take part in the
next round says so in its word. A rank that has entered can still withdraw while another is missing: it announces that
it tries to, then reads the others' words. A rank that finds all words complete reads them all once more, and waits
while one of them announces a try. So the withdrawing rank either sees a rank missing, in which case all ranks see that
it has withdrawn, or sees none missing and stays. (To announce and then to look are the two steps of Dekker's and
Peterson's mutual exclusion.) Once the coordinator has run a name, a new series of its rounds begins, at the same
decision on all ranks.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import os
import select
import threading
from collections.abc import Iterable, Sequence

import torch

from spark_hvd.collectives.pending.use import SlotUse
from spark_hvd.transport.communicator import ReduceOp
from spark_hvd.transport.host.pipes import open_pipe
from spark_hvd.transport.host.synchronization import AdaptiveSpin, Fence
from spark_hvd.transport.torch_private import add_all, copy_all, sums_of

_MOST_RANKS = 16
"""Each rank reads all ranks' copies, so this does not pay off with more ranks."""
_SLOTS = 2048
_DATA = 8 << 20
"""Bytes of one turn of all slots of a rank. The kernel provides pages when they are first written."""
_SLEEPS, _PID, _FD, _INODE, _LAST, _LAST_NS, _FIRST = 0, 1, 2, 3, 4, 5, 8
"""Indices of a rank's words; those of slots follow. _LAST and _LAST_NS: the slot of its latest call, and its time."""
KINDS = [(_FIRST + _SLOTS, torch.int64), (2 * _DATA, torch.uint8)]
"""Number of elements and dtype of each rank's words and data."""
_TRIES, _WITHDRAWN, _ENDS = 1, 2, 3
"""The lowest two bits of a word, next to the round: the rank tries to withdraw from the round, has withdrawn, or has
entered it and will not enter the next one."""


class RoundState(enum.Enum):
    """What a rank that waits in a slot sees of its round."""

    WAITS = 0
    COMPLETE = 1
    WITHDRAWN = 2
    """The call goes to the coordinator instead."""


class Slot:
    """The place of one name in the shared memory, from the point of view of one rank.

    Args:
        word: Index among the words.
        start: Offset in the bytes of either turn.
        room: Bytes of data.
    """

    __slots__ = (
        *("closed", "contributes", "copies", "finishes", "handle", "prescales", "room", "round", "series"),
        *("size", "start", "sums", "use", "word"),
    )

    def __init__(self, word: int, start: int, room: int) -> None:
        self.word = word
        self.start = start
        self.room = room
        self.series = 0
        self.round = 0
        """The last round that this rank entered."""
        self.closed = True
        """Whether this rank enters no round until a new series begins."""
        self.handle: object = None
        """The handle of the call in flight on this rank; None if there is none."""
        self.copies: list[list[torch.Tensor]]
        """Every rank's copy, in rank order, for either turn."""
        self.contributes: bool
        """Whether the others need this rank's tensor."""

    def serve(self, use: SlotUse) -> None:
        """Serve this kind of call from now on."""
        # Cached, because many calls need them at once and reading them from the use takes ten times as long.
        self.use = use
        self.size = use.nbytes
        self.sums = use.sums
        self.prescales = use.prescale != 1.0
        self.finishes = use.op is ReduceOp.AVERAGE or use.postscale != 1.0

    def begin(self) -> None:
        """Begin a new series of rounds."""
        self.series += 1
        self.round = self.series << 32
        self.closed = False


class Slots:
    """The slots of a process set. All methods but :meth:`state` and :meth:`sleep` need the queue's lock.

    ``words`` and ``data`` are every rank's, in rank order.
    """

    def __init__(self, words: Sequence[torch.Tensor], data: Sequence[torch.Tensor], place: int) -> None:
        self._tensors = words
        views = self._views = [_words_of(tensor) for tensor in words]
        self._mine = views[place]
        self._others = [view for other, view in enumerate(views) if other != place]
        self._data = data
        self._place = place
        self._passes = range(1 if len(data) == 2 else 2)
        self._fence = Fence()
        self._published = Fence()
        self._fence_lock = threading.Lock()
        self._slots: dict[int, Slot] = {}
        self._by_name: dict[str, Slot] = {}
        self._end = 0
        self.ids = 0
        """The numbers of the names that have a slot, as bits; the same on all ranks."""
        self.spin = AdaptiveSpin(len(data))
        """Spins for a moment before this rank sleeps."""
        self._woken, self._wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._bells: list[int | None] = [None for _ in self._others]
        """Pipe that wakes each other rank; None: not opened yet."""
        self._mine[_INODE], self._mine[_FD] = os.fstat(self._wakes).st_ino, self._wakes
        self._mine[_PID] = os.getpid()

    def __del__(self) -> None:
        """Close the pipes; no thread waits any more."""
        for fd in [self._woken, self._wakes, *(bell for bell in self._bells if bell is not None and bell >= 0)]:
            os.close(fd)

    # ---- the engine's thread --------------------------------------------------------------------------------------

    def learn(self, id: int, use: SlotUse | None) -> Slot | None:
        """Give a name with a number a slot, if its calls can use one. All ranks do so in the same order."""
        slot = self._slots.get(id)
        if use is None:
            if slot is not None:  # it may come back
                slot.closed = True
            return None
        size = use.nbytes
        if slot is None or slot.room < size or slot.start % use.dtype.itemsize:
            start = self._end + -self._end % use.dtype.itemsize
            word = slot.word if slot is not None else _FIRST + len(self._slots)
            if start + size > _DATA or word >= _FIRST + _SLOTS:
                return None
            series = slot.series if slot is not None else 0
            slot = Slot(word, start, size)
            slot.series = series
            self._end = start + size
            self._slots[id] = self._by_name[use.name] = slot
            self.ids |= 1 << id
        slot.serve(use)
        starts = slot.start, _DATA + slot.start
        slot.copies = [
            [each[low : low + size].view(use.dtype).view(use.shape) for each in self._data] for low in starts
        ]
        slot.contributes = use.needs(self._place)
        slot.begin()
        return slot

    def has_run(self, ids: int) -> None:
        """Begin new series of rounds for these names: the coordinator has run them, so all ranks left the old."""
        for id, slot in self._slots.items():
            if ids >> id & 1:
                slot.begin()

    # ---- rounds ---------------------------------------------------------------------------------------------------

    def of(self, name: str) -> Slot | None:
        """Return the slot of a name."""
        return self._by_name.get(name)

    def numbered(self, ids: int) -> list[Slot]:
        """Return the slots of these numbers."""
        return [slot for id, slot in self._slots.items() if ids >> id & 1]

    def enter(self, calls: Sequence[tuple[Slot, torch.Tensor]], now: float) -> None:
        """Enter the next rounds of open slots.

        ``calls`` holds each slot once, with this rank's tensor for it. ``now`` is in seconds on the monotonic clock.
        """
        contributing = [call for call in calls if call[0].contributes]
        if contributing:
            with torch.no_grad():
                self._copy_in([slot for slot, _ in contributing], [tensor for _, tensor in contributing])
        words = self._mine
        self._published.release()
        words[_LAST], words[_LAST_NS] = calls[-1][0].word, int(now * 1e9)
        for slot, _ in calls:
            slot.round += 1
            words[slot.word] = slot.round << 2
        self._ring()

    def _copy_in(self, slots: Sequence[Slot], tensors: list[torch.Tensor]) -> None:
        """Copy this rank's tensors to where the others read those of the next rounds."""
        place, first, end = self._place, slots[0], slots[0].start
        turn, dtype = first.round + 1 & 1, first.use.dtype
        for slot in slots:
            if slot.start != end or slot.round + 1 & 1 != turn or slot.use.dtype is not dtype:
                copy_all([slot.copies[slot.round + 1 & 1][place] for slot in slots], tensors)
                break
            end += slot.size
        else:  # they are adjacent, because they were called in this order before: this takes a third of the time
            flat = self._data[place][turn * _DATA + first.start : turn * _DATA + end].view(dtype)
            torch.cat([tensor if tensor.dim() == 1 else tensor.reshape(-1) for tensor in tensors], out=flat)
        for slot in slots:
            if slot.prescales:
                slot.copies[slot.round + 1 & 1][place].mul_(slot.use.prescale)

    def last(self, place: int) -> tuple[float, str] | None:
        """Return when a rank last entered a round, on the host's monotonic clock, and that round's name."""
        words = self._views[place]
        word, at = words[_LAST], words[_LAST_NS]
        name = next((slot.use.name for slot in self._by_name.values() if slot.word == word), None)
        return None if name is None else (at / 1e9, name)

    def _ring(self) -> None:
        """Wake the ranks that sleep."""
        self._settled()
        for place, words in enumerate(self._others):
            if words[_SLEEPS]:
                words[_SLEEPS] = 0
                self._wake(place, words)

    def state(self, slot: Slot) -> RoundState:
        """Return the state of the round that this rank has entered."""
        word, here = slot.word, slot.round << 2
        for _ in self._passes:
            waits = False
            for words in self._others:
                there = words[word] - here
                if there == _WITHDRAWN or there == _ENDS - 4:
                    return RoundState.WITHDRAWN
                if there < 0 or there == _TRIES:
                    waits = True
            if waits:
                return RoundState.WAITS
            # Also between the two passes: the second reads what was written before the values that the first has read.
            self._published.acquire()
        return RoundState.COMPLETE

    def ended(self, slots: Iterable[Slot]) -> int:
        """Return how many of the slots, counted from the first, have completed their rounds."""
        number = 0
        if len(self._others) > 1:
            for slot in slots:
                if self.state(slot) is not RoundState.COMPLETE:
                    break
                number += 1
            return number
        (words,) = self._others
        for slot in slots:  # inlined from state(), whose call would take longer than everything else here
            if not 0 <= words[slot.word] - (slot.round << 2) not in (_TRIES, _WITHDRAWN):
                break
            number += 1
        self._published.acquire()
        return number

    def results(self, rounds: Sequence[Slot]) -> list[torch.Tensor]:
        """Return the results of complete rounds, in new tensors."""
        with torch.no_grad(), torch.inference_mode(False):  # the caller may use them anywhere
            sums = iter(self._sums([slot for slot in rounds if slot.sums]))
            return [next(sums) if slot.sums else slot.use.result(self._copies(slot)) for slot in rounds]

    def _sums(self, rounds: Sequence[Slot]) -> list[torch.Tensor]:
        if not rounds:
            return []
        copies = [self._copies(slot) for slot in rounds]
        totals = sums_of([each[0] for each in copies], [each[1] for each in copies])
        self._finish(rounds, copies, totals)
        return totals

    def write_results(self, rounds: Sequence[tuple[Slot, torch.Tensor]], *, kept: bool) -> None:
        """Write the results of complete rounds into the tensors with which this rank entered.

        ``kept`` says that the tensors still hold their values.

        Raises:
            RuntimeError: A tensor is not writable; those before it have been written.
        """
        with torch.no_grad():
            sums = [each for each in rounds if each[0].sums]
            if sums:
                self._sum_into([slot for slot, _ in sums], [out for _, out in sums], kept=kept)
            if len(sums) < len(rounds):
                for slot, out in rounds:
                    if not slot.sums:
                        out.copy_(slot.use.result(self._copies(slot)))

    def _sum_into(self, slots: Sequence[Slot], outs: list[torch.Tensor], *, kept: bool) -> None:
        copies = [slot.copies[slot.round & 1] for slot in slots]
        if kept and len(self._data) == 2 and not any(slot.prescales for slot in slots):
            # The sum of two numbers is the same in either order, so the tensors may replace their copies.
            add_all(outs, [each[1 - self._place] for each in copies])
        else:
            copy_all(outs, [each[0] for each in copies])
            add_all(outs, [each[1] for each in copies])
        self._finish(slots, copies, outs)

    def _finish(
        self, slots: Sequence[Slot], copies: Sequence[Sequence[torch.Tensor]], totals: list[torch.Tensor]
    ) -> None:
        """Add the copies from the third rank on to the sums of the first two, and finish them."""
        for place in range(2, len(self._data)):
            add_all(totals, [each[place] for each in copies])
        for slot, each, total in zip(slots, copies, totals, strict=True):
            if slot.finishes:
                slot.use.finish(total, each)

    def _copies(self, slot: Slot) -> list[torch.Tensor]:
        """Return all ranks' tensors of the present round."""
        return slot.copies[slot.round & 1]

    def close(self, slot: Slot) -> bool:
        """Enter no further round, and withdraw from the present one if a rank is missing.

        Returns:
            Whether this rank has withdrawn.
        """
        here = slot.round << 2
        if slot.closed:
            return False
        if slot.handle is None:
            self._mine[slot.word] = here | _ENDS
            slot.closed = True
            return False
        self._mine[slot.word] = here | _TRIES
        self._settled()
        if any(words[slot.word] < here for words in self._others):
            self._mine[slot.word] = here | _WITHDRAWN
            slot.closed = True
            return True
        self._mine[slot.word] = here
        return False

    def leave(self, slot: Slot) -> None:
        """Leave the round: another rank has withdrawn from it, or has not entered it."""
        self._mine[slot.word] = slot.round << 2 | _WITHDRAWN
        slot.closed = True

    def sleep(self, slot: Slot, seconds: float) -> None:
        """Wait until a rank enters a round of any slot, for some seconds at most; not under the lock."""
        self._mine[_SLEEPS] = 1
        self._settled()
        poller = select.poll()  # each thread needs one
        poller.register(self._woken, select.POLLIN)
        if self.state(slot) is RoundState.WAITS and poller.poll(seconds * 1e3):
            with contextlib.suppress(BlockingIOError):  # another thread has read it
                os.read(self._woken, 4096)
        self._mine[_SLEEPS] = 0

    def _settled(self) -> None:
        """Make this rank's writes visible to all before it reads theirs."""
        with self._fence_lock:
            self._fence()

    def _wake(self, place: int, words: memoryview) -> None:
        bell = self._bells[place]
        if bell is None:
            bell = self._bells[place] = _opened(words)
        if bell >= 0:
            with contextlib.suppress(OSError):  # a full pipe will wake it; a broken one means that it is gone
                os.write(bell, b"\0")


def _words_of(tensor: torch.Tensor) -> memoryview:
    array = (ctypes.c_uint64 * tensor.numel()).from_address(tensor.data_ptr())
    return memoryview(array).cast("B").cast("Q")


def _opened(words: memoryview) -> int:
    """Open the write end of another rank's pipe; return -1 if it cannot be reached, and then that rank polls."""
    with contextlib.suppress(OSError):
        return open_pipe(words[_PID], words[_FD], words[_INODE], os.O_WRONLY)
    return -1


def may_serve(size: int) -> bool:
    """Return whether a process set of this size has slots."""
    return 1 < size <= _MOST_RANKS
