"""Large named all-reduces through memory that a host's ranks share: on one host, or in two levels on several.

A tensor is reduced piece by piece. While the other ranks or the network work on some pieces, the next one is filled and
the first one is taken out. One thread does this for one tensor after another, in the same order on all ranks, so other
collectives can be negotiated meanwhile.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch
import torch.distributed as dist

from spark_hvd.transport.communicator import Handle
from spark_hvd.transport.connections import Abortable, Forkable
from spark_hvd.transport.exchange import exchange
from spark_hvd.transport.groups import Groups
from spark_hvd.transport.handles import failed, is_out_of_memory
from spark_hvd.transport.host.hierarchy import HierarchicalSum, Hierarchy, HostSharing
from spark_hvd.transport.host.shared_memory import MemorySum, SharedSum
from spark_hvd.world.activity import activity

LEAST = 1 << 18
"""Minimum bytes on several hosts: below this, two more waits cost more than the link saves."""
LEAST_AT_HOME = 3 << 19
"""Minimum bytes on one host: from here on, two waits cost less than moving the data through Gloo."""
_BUFFERS = 5
"""Number of pieces that are in memory at a time."""
PIECE = 2 << 20
"""Bytes of a piece. Smaller pieces would cost small tensors more than the overlap saves."""
PARTS = [(PIECE, torch.uint8)] * _BUFFERS
"""Number of elements and dtype of each rank's buffers for pieces."""

Change = Callable[[torch.Tensor], None]
"""A change of some elements, in place and element by element."""
_Job = Callable[[], None]


class SlicedStaging(Forkable):
    """Memory of the ranks of this host, and the thread that sums in it.

    ``parts`` has, for each buffer, the memory of all ranks of this host, in rank order.
    """

    def __init__(self, sharing: HostSharing, parts: Sequence[Sequence[torch.Tensor]]) -> None:
        self._sharing = sharing
        levels = sharing.levels if isinstance(sharing, Hierarchy) else None
        self._pipes = sharing.pipes if isinstance(sharing, Hierarchy) else sharing
        self.least = LEAST_AT_HOME if levels is None else LEAST
        """Minimum bytes of a tensor."""
        self.ends: list[Abortable] = [self] if levels is None else [levels.connections, self]
        """Connections to abort when a rank is lost."""
        self._parts = parts
        self._jobs = queue.SimpleQueue[_Job | None]()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        """Orders :meth:`allreduce` and :meth:`abort`, so that no job is queued behind the None that ends the thread."""
        self._ended = False

    @classmethod
    def open(
        cls, hierarchy: Hierarchy, process_set_id: int, groups: Groups, group: dist.ProcessGroup
    ) -> SlicedStaging | None:
        """Make and map memory; collective over `group`. Returns None on every rank if a rank has none to share."""
        ask = functools.partial(exchange, group=group, device=torch.device("cpu"))
        parts = hierarchy.levels.map_all(PARTS, ask)
        if parts is None:
            return None
        made = cls(hierarchy, parts)
        groups.keep(process_set_id, made)
        return made

    def allreduce(self, ins: torch.Tensor, outs: torch.Tensor, prepare: Change, finish: Change) -> Handle[None]:
        """Start to sum a tensor over all ranks.

        ``ins`` and ``outs`` are flat, and may be the same; ``prepare`` scales the input.
        """
        future = Future[None]()
        with self._lock:
            if self._ended:
                future.set_exception(RuntimeError("this rank has left the world"))
                return SlicedSum(future)
            if self._thread is None:
                self._thread = threading.Thread(target=_serve, args=[self._jobs], name="spark_hvd-levels", daemon=True)
                self._thread.start()
            self._jobs.put(functools.partial(self._run, future, ins, outs, prepare, finish))
        return SlicedSum(future)

    def abort(self) -> None:
        """Leave: the other ranks of this host, and threads that wait here, see this rank as gone. From any thread."""
        with self._lock:
            self._ended = True
        self._pipes.abort()
        self._jobs.put(None)

    def forked(self) -> None:
        """See Forkable.forked."""
        self._lock = threading.Lock()  # the parent's may be held by a thread that does not exist here
        self._ended = True
        self._pipes.forked()

    def _run(
        self, future: Future[None], ins: torch.Tensor, outs: torch.Tensor, prepare: Change, finish: Change
    ) -> None:
        try:
            self._reduce(ins, outs, prepare, finish)
        except Exception as error:
            self._cut()  # the others wait for this rank
            future.set_exception(error)
        else:
            future.set_result(None)

    def _cut(self) -> None:
        if isinstance(self._sharing, Hierarchy):
            self._sharing.cut()
        else:
            self._sharing.abort()

    def _sum(self, buffers: Sequence[torch.Tensor], finish: Change) -> MemorySum:
        if isinstance(self._sharing, Hierarchy):
            return HierarchicalSum(buffers, self._sharing, finish)
        return SharedSum(buffers, self._sharing, finish)

    @torch.no_grad()
    def _reduce(self, ins: torch.Tensor, outs: torch.Tensor, prepare: Change, finish: Change) -> None:
        dtype, numel = ins.dtype, ins.numel()
        size = PIECE // dtype.itemsize
        in_flight = deque[tuple[MemorySum, torch.Tensor, torch.Tensor]]()

        def take_out() -> None:
            oldest, buffer, out = in_flight.popleft()
            oldest.wait()
            out.copy_(buffer)

        for number, low in enumerate(range(0, numel, size)):
            if number >= _BUFFERS:
                take_out()
            high = min(low + size, numel)
            buffers = [each[: (high - low) * dtype.itemsize].view(dtype) for each in self._parts[number % _BUFFERS]]
            mine = buffers[self._pipes.place]
            mine.copy_(ins[low:high])
            prepare(mine)
            started = self._sum(buffers, finish)
            started.start()
            # Blocks until this rank has done its part of the previous piece. The other ranks, or the network, then have
            # all pieces but this one, and need not wait for this rank while it waits for the oldest.
            if in_flight:
                in_flight[-1][0].advance()
            started.poll()
            in_flight.append((started, mine, outs[low:high]))
        if in_flight:
            in_flight[-1][0].advance()
        while in_flight:
            take_out()


def _serve(jobs: queue.SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # it holds tensors that may be free long before the next job comes


class SlicedSum(Handle[None]):
    """A sum that the thread runs or has run."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        try:
            if self._future.done():
                self._future.result()
            else:
                with activity.waiting("allreduce"):
                    self._future.result()
        except RuntimeError as error:
            raise failed("allreduce", error) from error
        # The future's callbacks refer to waiting threads and so to the tensors, until the next garbage collection.
        self._future = _ENDED

    def fault(self) -> Exception | None:
        """Return an error of this rank's own, such as a lack of memory; None if nothing, a peer or the wire failed."""
        error = self._future.exception()
        if not isinstance(error, Exception) or (isinstance(error, RuntimeError) and not is_out_of_memory(error)):
            return None
        return error

    def done(self) -> bool:
        return self._future.done()

    def when_done(self, callback: Callable[[], None]) -> None:
        self._future.add_done_callback(lambda _: callback())


_ENDED = Future[None]()
_ENDED.set_result(None)
