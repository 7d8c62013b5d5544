"""Writing while training goes on: in a thread, one save at a time, and no failure is lost.

Nothing here needs another rank, so that what a rank writes alone ends whether its peers live or not.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from spark_hvd.checkpoint import background
from spark_hvd.checkpoint.copies import Memory, copied
from spark_hvd.collectives.objects import allgather_object
from spark_hvd.context import leave
from spark_hvd.context.standing import generation, in_world, is_initialized
from spark_hvd.store.errors import StoreError, store_error
from spark_hvd.world.errors import CollectiveError

_log = logging.getLogger(__name__)
_latest: Write | None = None
_memory = Memory()


class Write:
    """Something that is being written.

    Args:
        path: What, for messages.
        do: Writes it.

    Attributes:
        failure: Why it could not be written, once it has ended.
        is_told: Whether the failure was raised somewhere.
    """

    def __init__(self, path: str, do: Callable[[], None]) -> None:
        self.failure: StoreError | None = None
        self.is_told = False
        self._path, self._do = path, do
        self._generation = generation() if is_initialized() else 0
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
        # No daemon: a process that ends waits for it.
        self._thread = threading.Thread(target=self._run, name="spark_hvd-checkpoint")
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether nothing is left to do."""
        return not self._thread.is_alive()

    def join(self) -> None:
        """Wait until nothing is left to do."""
        self._thread.join()
        if isinstance(self.failure and self.failure.__cause__, CollectiveError) and is_initialized():
            # The ranks that it needed are no more: whoever goes on without them was told by the end of their world.
            self.is_told = self.is_told or generation() != self._generation

    def _run(self) -> None:
        try:
            if self._device is not None:
                torch.cuda.set_device(self._device)
            self._do()
        except Exception as error:
            cause = error if isinstance(error, StoreError) else store_error("write", self._path, error)
            self.failure = StoreError(f"saving {self._path} in the background failed: {cause}")
            self.failure.__cause__ = error
            _log.warning("%s", self.failure)
        finally:
            del self._do  # and with it the copy of the state


def start(path: str, state: Mapping[str, Any], put: Callable[[dict[str, Any]], None]) -> Write:
    """Copy a state, and have it written in the background; what was written before must have ended: :func:`finish`.

    Args:
        path: What is written, for messages.
        state: What a checkpoint can hold.
        put: Writes the copy, in another thread.
    """
    global _latest
    assert _latest is None or _latest.ended, "its copy is in the memory that is used for this one"
    copy = copied(state, _memory)
    _latest = Write(path, lambda: put(copy))
    return _latest


def ended() -> StoreError | None:
    """Wait for what is being written, and return why it failed, if it did and nobody was told. They are now."""
    write = _latest
    if write is None:
        return None
    write.join()
    if write.is_told:
        return None
    write.is_told = True
    return write.failure


def finish() -> None:
    """Wait for what is being written.

    Raises:
        StoreError: It failed, and that was not raised yet.
    """
    failure = ended()
    if failure is not None:
        raise failure


leave.at_end.append(finish)


_handle: SaveHandle | None = None


class SaveHandle:
    """A save under way, as ``save(..., wait=False)`` returns it; one that waited returns one that is done."""

    __module__ = "spark_hvd.checkpoint"

    def __init__(self, write: background.Write | None, *, settled: bool = False) -> None:
        """Made by a save.

        Args:
            write: What is written by this rank; None where it has nothing to write.
            settled: Whether all ranks know how it ended.
        """
        self._write = write
        self._generation = generation()
        self._settled = settled
        self._failure: str | None = None

    def done(self) -> bool:
        """Whether this rank has nothing more to write. It says nothing of how that ended, nor of other ranks."""
        return self._write is None or self._write.ended

    def wait(self) -> None:
        """Wait until the checkpoint is whole. To be called by all ranks, or by none.

        Raises:
            StoreError: It could not be written. Raised on every rank, each time.
            CollectiveError: A peer or the network failed.
        """
        if not self._settled:
            if in_world() and generation() == self._generation:
                self._settle(_exchanged(self._write))
            else:  # the ranks that it was saved with are no more
                failure = _ended(self._write)
                self._settle(None if failure is None else str(failure))
        if self._failure is not None:
            raise StoreError(self._failure)

    def _settle(self, failure: str | None) -> None:
        self._settled, self._failure = True, failure


def start_saving(write: background.Write | None) -> SaveHandle:
    """The handle of a save that all ranks have just begun.

    Args:
        write: What is written by this rank.
    """
    global _handle
    _handle = SaveHandle(write)
    return _handle


def settle() -> None:
    """Wait until what was saved in the background before is whole; collective in a world.

    Raises:
        StoreError: It is not, and that was not raised yet. Raised on every rank.
        CollectiveError: A peer or the network failed.
    """
    global _handle
    if not in_world():
        background.finish()
        return
    failure = _exchanged(None)
    if _handle is not None and not _handle._settled:
        _handle._settle(failure)
    _handle = None
    if failure is not None:
        raise StoreError(failure)


def _exchanged(write: background.Write | None) -> str | None:
    """Why the save of any rank failed; collective."""
    failure = _ended(write)
    texts = allgather_object(None if failure is None else str(failure), name="spark_hvd.checkpoint.outcome")
    return next((text for text in texts if text is not None), None)


def _ended(write: background.Write | None) -> StoreError | None:
    untold = background.ended()
    return untold if write is None or write.failure is None else write.failure
