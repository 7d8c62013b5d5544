"""Writing while training goes on: in a thread, one save at a time, and no failure is lost.

Nothing here needs another rank, so that what a rank writes alone ends whether its peers live or not.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from spark_hvd.checkpoint.copies import Memory, copied
from spark_hvd.context import leave
from spark_hvd.context.standing import generation, is_initialized
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
