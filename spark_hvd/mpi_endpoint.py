"""One rank's end of an MPI communicator: its operations under way, its timeout, and how it is left."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

from spark_hvd.errors import CollectiveError
from spark_hvd.mpi_library import MPI
from spark_hvd.mpi_progress import PROGRESS, Operation

_LAST_SECONDS = 1.0
"""How long closing waits for what is under way: it may still end well, and the other ranks may need it."""


class Endpoint:
    """Owns its MPI communicator.

    Args:
        communicator: One that nobody else uses; it is freed with the endpoint.
        timeout: Seconds until an operation gives up on the other ranks.
    """

    def __init__(self, communicator: MPI.Intracomm, timeout: float) -> None:
        # What fails is to raise, not to end every process of the program.
        communicator.Set_errhandler(MPI.ERRORS_RETURN)
        self.communicator = communicator
        self.rank: int = communicator.rank
        self.size: int = communicator.size
        self.timeout = timeout
        self._closed: str | None = None
        self._lock = threading.Lock()

    @classmethod
    def over(cls, parent: MPI.Intracomm, ranks: Sequence[int] | None, name: str, timeout: float) -> Endpoint:
        """Make one for some ranks of a communicator; each of them must call this, and no other.

        Args:
            parent: The communicator.
            ranks: In `parent`, in the order that they are to have; None for all.
            name: The same on all of them, and different from what others make at the same time.
            timeout: Seconds until an operation gives up on the other ranks.

        Raises:
            CollectiveError: MPI cannot make it.
        """
        everyone = parent.Get_group()
        members = everyone.Incl(list(range(parent.size) if ranks is None else ranks))
        try:
            return cls(parent.Create_group(members, _tag(name)), timeout)
        except MPI.Exception as error:
            raise CollectiveError(f"MPI made no communicator for {name}: {error.Get_error_string()}") from error
        finally:
            members.Free()
            everyone.Free()

    def start(self, name: str, call: Callable[..., MPI.Request], *arguments: Any, keep: Any = None) -> Operation:
        """Start one of the communicator's operations, see :meth:`spark_hvd.mpi_progress.Progress.start`."""
        with self._lock:
            if self._closed is not None:
                raise CollectiveError(f"{name} cannot start on rank {self.rank}: {self._closed}")
            return PROGRESS.start(self, name, call, arguments, keep)

    def cut(self) -> None:
        """Give up what is under way on this rank; MPI cannot be told to. From any thread."""
        with self._lock:
            self._closed = self._closed or "this rank has left the communicator."
        for operation in PROGRESS.of(self):
            operation.fail("this rank has left the communicator.")

    def close(self) -> None:
        """Let what is under way end, for a second at most, give up the rest, and free the communicator."""
        until = time.monotonic() + _LAST_SECONDS
        while (left := PROGRESS.of(self)) and time.monotonic() < until:
            if not left[0].poll(8):
                time.sleep(1e-4)
        self.cut()
        if not left and self.communicator != MPI.COMM_NULL:
            self.communicator.Free()


def _tag(name: str) -> int:
    return zlib.crc32(name.encode()) & 0x7FFF  # every MPI has tags up to 32767
