"""What a save in the background returns, and how all ranks hear of its end: at the next save, and in wait()."""

from __future__ import annotations

from spark_hvd.checkpoint import background
from spark_hvd.collectives.objects import allgather_object
from spark_hvd.context.standing import generation, in_world
from spark_hvd.store.errors import StoreError

_latest: SaveHandle | None = None


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
    global _latest
    _latest = SaveHandle(write)
    return _latest


def settle() -> None:
    """Wait until what was saved in the background before is whole; collective in a world.

    Raises:
        StoreError: It is not, and that was not raised yet. Raised on every rank.
        CollectiveError: A peer or the network failed.
    """
    global _latest
    if not in_world():
        background.finish()
        return
    failure = _exchanged(None)
    if _latest is not None and not _latest._settled:
        _latest._settle(failure)
    _latest = None
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
