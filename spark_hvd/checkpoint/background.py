"""Writes checkpoints in a thread while training continues: one save at a time, and every failure is reported.

A file that one rank writes alone needs no other rank, so the save ends even if peers are lost. :func:`settle` needs all
ranks.
"""

from __future__ import annotations

import copy
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from spark_hvd.collectives.objects import allgather_object
from spark_hvd.context import leave
from spark_hvd.context.global_state import generation, in_world, is_initialized
from spark_hvd.store.errors import StoreError, store_error
from spark_hvd.transport.host.pages import pinned
from spark_hvd.transport.torch_private import local_part, storage_key, with_local_part
from spark_hvd.world.activity import activity
from spark_hvd.world.errors import CollectiveError

Bytes = npt.NDArray[np.uint8]

_ALIGNMENT = 64
"""Bytes: each copied storage begins at a multiple of this."""
_PIECE = 8 << 20
"""Number of bytes that a thread copies at once."""
_THREADS = 4


def copied(state: Mapping[str, Any], memory: Memory) -> dict[str, Any]:
    """Return a copy of ``state`` that shares no memory with it, with tensors on the CPU.

    Tensors that share memory in ``state``, such as tied weights, also share it in the copy, so they are written once.
    The numbers are copied to ``memory``, over a previous copy there. Only this rank's part of a DTensor is copied.
    """
    tensors = {id(tensor): tensor for tensor in _tensors_in(state)}
    parts = {key: tensor if (part := local_part(tensor)) is None else part for key, tensor in tensors.items()}
    plain = [part for part in parts.values() if _has_plain_memory(part)]
    storages = _copies_of({storage_key(part): part.untyped_storage() for part in plain}, memory)
    # deepcopy uses the copies in its memo. It keeps the order and the attributes of a module's state_dict.
    memo: dict[int, Any] = {}
    for key, tensor in tensors.items():
        part = parts[key]
        if _has_plain_memory(part):
            copied_part = torch.empty(0, dtype=part.dtype, device="cpu")
            copied_part.set_(storages[storage_key(part)], part.storage_offset(), part.size(), part.stride())
        else:
            copied_part = part.detach().clone() if part.device.type == "meta" else part.detach().to("cpu", copy=True)
        if part is not tensor:
            memo[key] = with_local_part(tensor, copied_part)
        elif type(tensor) is torch.nn.Parameter:
            memo[key] = torch.nn.Parameter(copied_part, tensor.requires_grad)
        else:
            memo[key] = copied_part.requires_grad_() if tensor.requires_grad else copied_part
    return copy.deepcopy(dict(state), memo)


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors_in(item)
    elif type(value) in (list, tuple, set):
        for item in value:
            yield from _tensors_in(item)


def _has_plain_memory(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout == torch.strided
        and tensor.device.type != "meta"
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


class Memory:
    """Memory that is reused for each copy, because allocating it takes most of the time of a first copy."""

    def __init__(self) -> None:
        self._bytes = np.empty(0, dtype=np.uint8)
        self._pinned: list[Bytes] = []

    def take(self, sizes: Sequence[int], on_gpu: bool) -> list[Bytes]:
        """Return memory for parts of these sizes in bytes, which still has its previous content.

        With ``on_gpu``, the memory is pinned, so that a GPU can write to it directly.
        """
        if on_gpu:
            if [len(part) for part in self._pinned] != list(sizes):
                self._pinned = []  # free the old memory before allocating the new one
                self._pinned = [part.numpy() for part in pinned(sizes)]
            return self._pinned
        ends = list(accumulate(size + -size % _ALIGNMENT for size in sizes))
        if len(self._bytes) < (ends or [0])[-1]:
            self._bytes = np.empty(0, dtype=np.uint8)
            self._bytes = np.empty(ends[-1], dtype=np.uint8)
        return [self._bytes[start : start + size] for start, size in zip([0, *ends], sizes, strict=False)]


def _copies_of(storages: Mapping[int, torch.UntypedStorage], memory: Memory) -> dict[int, torch.UntypedStorage]:
    """Copy storages to ``memory``, under the same keys."""
    on_gpu = any(storage.device.type == "cuda" for storage in storages.values())
    parts = memory.take([storage.nbytes() for storage in storages.values()], on_gpu)
    copies, pieces = {}, []
    for (key, storage), part in zip(storages.items(), parts, strict=True):
        copies[key] = torch.from_numpy(part).untyped_storage()
        if storage.device.type == "cpu":
            source = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).numpy()
            pieces += [(part[at : at + _PIECE], source[at : at + _PIECE]) for at in range(0, len(part), _PIECE)]
        else:
            copies[key].copy_(storage, non_blocking=False)
    _copy(pieces)
    return copies


def _copy(pieces: list[tuple[Bytes, Bytes]]) -> None:
    """Copy (target, source) pairs with several threads. Soon the other ranks wait for this one, so cores are idle."""
    threads = min(_THREADS, os.cpu_count() or 1, len(pieces))
    if threads < 2:
        for target, source in pieces:
            np.copyto(target, source)
        return
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(lambda piece: np.copyto(*piece), pieces):
            pass


_log = logging.getLogger(__name__)
_latest: Write | None = None
_memory = Memory()


class Write:
    """A save in the background.

    Attributes:
        failure: Why the save failed, once it has ended.
        is_reported: Whether the failure was raised.
    """

    def __init__(self, path: str, do: Callable[[], None]) -> None:
        self.failure: StoreError | None = None
        self.is_reported = False
        self._path, self._do = path, do
        self._steps = activity.total_steps
        self._generation = generation() if is_initialized() else 0
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
        # Not a daemon thread, so that the process waits for it at exit.
        self._thread = threading.Thread(target=self._run, name="spark_hvd-checkpoint")
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether the save has ended."""
        return not self._thread.is_alive()

    def join(self) -> None:
        """Wait until the save has ended."""
        self._thread.join()
        if isinstance(self.failure and self.failure.__cause__, CollectiveError) and is_initialized():
            # The save needed ranks that were lost. The survivors know this from the end of their world.
            self.is_reported = self.is_reported or generation() != self._generation

    def _run(self) -> None:
        try:
            if self._device is not None:
                torch.cuda.set_device(self._device)
            self._do()
            activity.keep_steps(self._steps)
        except Exception as error:
            cause = error if isinstance(error, StoreError) else store_error("write", self._path, error)
            self.failure = StoreError(f"saving {self._path} in the background failed: {cause}")
            self.failure.__cause__ = error
            _log.warning("%s", self.failure)
        finally:
            del self._do  # frees the copy of the state


def start(path: str, state: Mapping[str, Any], put: Callable[[dict[str, Any]], None]) -> Write:
    """Copy a state, and write it in the background. The previous save must have ended; see :func:`finish`."""
    global _latest
    assert _latest is None or _latest.ended, "the previous save still uses the memory for the copy"
    copy = copied(state, _memory)
    _latest = Write(path, lambda: put(copy))
    return _latest


def ended() -> StoreError | None:
    """Wait for the current save. Return why it failed, unless that was reported before; it counts as reported now."""
    write = _latest
    if write is None:
        return None
    write.join()
    if write.is_reported:
        return None
    write.is_reported = True
    return write.failure


def finish() -> None:
    """Wait for the current save.

    Raises:
        StoreError: The save failed, and this was not raised before.
    """
    failure = ended()
    if failure is not None:
        raise failure


leave.at_end.append(finish)


_handle: SaveHandle | None = None


class SaveHandle:
    """The result of a save. After ``save(..., wait=False)`` it may still be running; otherwise it is done."""

    __module__ = "spark_hvd.checkpoint"

    def __init__(self, write: Write | None, *, settled: bool = False) -> None:
        """Create the handle of a save.

        Args:
            write: The save of this rank; None if this rank has nothing to write.
            settled: Whether all ranks know how the save ended.
        """
        self._write = write
        self._generation = generation()
        self._settled = settled
        self._failure: str | None = None

    def done(self) -> bool:
        """Return whether this rank has nothing more to write, regardless of the outcome here or on other ranks."""
        return self._write is None or self._write.ended

    def wait(self) -> None:
        """Wait until the checkpoint is complete. Either all ranks or none must call this.

        Raises:
            StoreError: The checkpoint could not be written. Raised on every rank, each time.
            CollectiveError: A peer or the network failed.
        """
        if not self._settled:
            if in_world() and generation() == self._generation:
                self._settle(_exchanged(self._write))
            else:  # the world in which it was saved has ended
                failure = _ended(self._write)
                self._settle(None if failure is None else str(failure))
        if self._failure is not None:
            raise StoreError(self._failure)

    def _settle(self, failure: str | None) -> None:
        self._settled, self._failure = True, failure


def start_saving(write: Write | None) -> SaveHandle:
    """Return the handle of a save that all ranks have just started."""
    global _handle
    _handle = SaveHandle(write)
    return _handle


def settle() -> None:
    """Wait until the previous save in the background is complete. Collective in a world.

    Raises:
        StoreError: The save failed, and this was not raised before. Raised on every rank.
        CollectiveError: A peer or the network failed.
    """
    global _handle
    if not in_world():
        finish()
        return
    failure = _exchanged(None)
    if _handle is not None and not _handle._settled:
        _handle._settle(failure)
    _handle = None
    if failure is not None:
        raise StoreError(failure)


def _exchanged(write: Write | None) -> str | None:
    """Return why the save failed on any rank, or None. Collective."""
    failure = _ended(write)
    texts = allgather_object(None if failure is None else str(failure), name="spark_hvd.checkpoint.outcome")
    return next((text for text in texts if text is not None), None)


def _ended(write: Write | None) -> StoreError | None:
    unreported = ended()
    return unreported if write is None or write.failure is None else write.failure
