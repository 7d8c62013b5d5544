"""One rank's end of an MPI communicator: its operations in flight, its timeout, and how it leaves."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

from spark_hvd.transport.connections import Abortable
from spark_hvd.transport.mpi.library import MPI, TURNS
from spark_hvd.transport.mpi.progress import PROGRESS, Operation
from spark_hvd.world.errors import CollectiveError

_LAST_SECONDS = 1.0
"""How long operations in flight may continue after a rank has left: they may succeed, and others may need them."""


class MpiEndpoint(Abortable):
    """Owns its MPI communicator, which nobody else uses and which is freed with the endpoint.

    ``ranks`` are the communicator's, as numbers in the default process group. ``name`` is torch.distributed's name of
    the process group that uses it. ``timeout`` is the number of seconds that an operation waits for the other ranks.
    """

    def __init__(self, communicator: MPI.Intracomm, ranks: Sequence[int], name: str, timeout: float) -> None:
        # Errors must raise instead of ending every process of the program.
        communicator.Set_errhandler(MPI.ERRORS_RETURN)
        self.communicator = communicator
        self.ranks = ranks
        self.name = name
        self.rank: int = communicator.rank
        self.size: int = communicator.size
        self.timeout = timeout
        self._closed: str | None = None
        # Held during each start, so that abort() either finds an operation in flight or makes it fail to start.
        self._lock = threading.Lock()
        _open.add(self)

    @classmethod
    def over(cls, parent: MPI.Intracomm, ranks: Sequence[int] | None, name: str, timeout: float) -> MpiEndpoint:
        """Make an endpoint for some ranks of a communicator; exactly these must call this.

        ``ranks`` are numbers in ``parent``, in their new order; None: all. ``timeout`` is the number of seconds that an
        operation waits for the other ranks. The name must be the same on all of them, and differ from names that others
        use at the same time.

        Raises:
            CollectiveError: MPI cannot make the communicator.
        """
        ranks = range(parent.size) if ranks is None else ranks
        try:
            return cls(part_of(parent, ranks, name), ranks, name, timeout)
        except MPI.Exception as error:
            raise CollectiveError(f"MPI made no communicator for {name}: {error.Get_error_string()}") from error

    def start(self, name: str, call: Callable[..., MPI.Request], *arguments: Any, keep: Any = None) -> Operation:
        """Start one of the communicator's operations, see :meth:`.ProgressThread.start`."""
        with self._lock:
            if self._closed is not None:
                raise CollectiveError(f"{name} cannot start on rank {self.rank}: {self._closed}")
            return PROGRESS.start(self, name, call, arguments, keep)

    def abort(self, error: str = "this rank has left the communicator.") -> None:
        """Give up operations in flight on this rank; MPI itself cannot cancel them. From any thread."""
        with self._lock:
            self._closed = self._closed or error
        for operation in PROGRESS.of(self):
            operation.fail(error)

    def close(self) -> None:
        """Let operations in flight end, for a second at most, give up the rest, and free the communicator."""
        _open.discard(self)
        until = time.monotonic() + _LAST_SECONDS
        while (left := PROGRESS.of(self)) and time.monotonic() < until:
            if not left[0].poll(8):
                time.sleep(1e-4)
        self.abort()
        if not left and self.communicator != MPI.COMM_NULL:
            with TURNS:
                self.communicator.Free()


_open: set[MpiEndpoint] = set()


def lose(rank: int, text: str, prefix: str) -> None:
    """Give up the operations that need a lost rank, after a moment in which they may still end.

    Over Gloo, a rank that leaves closes its connections, so the others know. MPI has nothing like that.

    Args:
        rank: Number in the default process group.
        text: What has happened to it, for an error.
        prefix: Prefix of the names of the process groups concerned.
    """
    lost = [each for each in list(_open) if rank in each.ranks and each.name.startswith(prefix)]

    def give_up() -> None:
        for endpoint in lost:
            if endpoint in _open:
                endpoint.abort(text)

    PROGRESS.later(_LAST_SECONDS, give_up)


def part_of(parent: MPI.Intracomm, ranks: Sequence[int], name: str) -> MPI.Intracomm:
    """Return a communicator of some ranks of another; exactly these must call this.

    The name must be the same on all of them, and differ from names that others use at the same time.
    """
    with TURNS:
        everyone = parent.Get_group()
        members = everyone.Incl(list(ranks))
        try:
            # Every MPI supports tags up to 32767.
            return parent.Create_group(members, zlib.crc32(name.encode()) & 0x7FFF)
        finally:
            members.Free()
            everyone.Free()
