"""One rank's end of an MPI communicator: its operations under way, its timeout, and how it is left."""

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
"""How long what is under way has left when a rank leaves: it may still end well, and the other ranks may need it."""


class MpiEndpoint(Abortable):
    """Owns its MPI communicator. Nobody else uses the communicator, which is freed with the endpoint.

    ``ranks`` are the communicator's in the default process group. ``name`` is what torch.distributed calls the process
    group that uses it. ``timeout`` is how many seconds an operation waits for the other ranks.
    """

    def __init__(self, communicator: MPI.Intracomm, ranks: Sequence[int], name: str, timeout: float) -> None:
        # What fails is to raise, not to end every process of the program.
        communicator.Set_errhandler(MPI.ERRORS_RETURN)
        self.communicator = communicator
        self.ranks = ranks
        self.name = name
        self.rank: int = communicator.rank
        self.size: int = communicator.size
        self.timeout = timeout
        self._closed: str | None = None
        self._lock = threading.Lock()  # held over each start: abort() finds it among those under way, or it is refused
        _open.add(self)

    @classmethod
    def over(cls, parent: MPI.Intracomm, ranks: Sequence[int] | None, name: str, timeout: float) -> MpiEndpoint:
        """Make one for some ranks of a communicator; each of them must call this, and no other.

        ``ranks`` are numbers in ``parent``, in the order that they are to have; None: all. ``timeout`` is how many
        seconds an operation waits for the other ranks. The name is the same on all of them, and different from what
        others make at the same time.

        Raises:
            CollectiveError: MPI cannot make it.
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
        """Give up what is under way on this rank; MPI itself cannot be told to. From any thread."""
        with self._lock:
            self._closed = self._closed or error
        for operation in PROGRESS.of(self):
            operation.fail(error)

    def close(self) -> None:
        """Let what is under way end, for a second at most, give up the rest, and free the communicator."""
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
    """A rank has left or is gone: in a moment, in which what is under way may still end, give up what needs it.

    Over Gloo a rank that leaves closes its connections, and those who wait for it know. MPI has nothing of the kind.

    Args:
        rank: In the default process group.
        text: What has become of it, for an error.
        prefix: Of the names of the process groups that this concerns.
    """
    lost = [each for each in list(_open) if rank in each.ranks and each.name.startswith(prefix)]

    def give_up() -> None:
        for endpoint in lost:
            if endpoint in _open:
                endpoint.abort(text)

    PROGRESS.later(_LAST_SECONDS, give_up)


def part_of(parent: MPI.Intracomm, ranks: Sequence[int], name: str) -> MPI.Intracomm:
    """A communicator of some ranks of another; each of them must call this, and no other.

    The name is the same on all of them, and different from what others make at the same time.
    """
    with TURNS:
        everyone = parent.Get_group()
        members = everyone.Incl(list(ranks))
        try:
            # Every MPI has tags up to 32767.
            return parent.Create_group(members, zlib.crc32(name.encode()) & 0x7FFF)
        finally:
            members.Free()
            everyone.Free()
