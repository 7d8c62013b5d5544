"""Writing while training goes on: in a thread, one save at a time, and no failure is lost.

What a rank writes alone needs no other rank, so it ends whether its peers live or not; :func:`settle` needs all.
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
from spark_hvd.context.standing import generation, in_world, is_initialized
from spark_hvd.store.errors import StoreError, store_error
from spark_hvd.transport.host.pages import pinned
from spark_hvd.transport.torch_private import local_part, storage_key, with_local_part
from spark_hvd.world.activity import activity
from spark_hvd.world.errors import CollectiveError

Bytes = npt.NDArray[np.uint8]

_ALIGNMENT = 64
"""Bytes. Each copied storage begins at a multiple."""
_PIECE = 8 << 20
"""Bytes that a thread copies at once."""
_THREADS = 4


def copied(state: Mapping[str, Any], memory: Memory) -> dict[str, Any]:
    """Return a copy of ``state`` that shares no memory with it, with tensors on the CPU.

    What shares memory in ``state``, such as tied weights, does so in the copy: it is written once, as without a copy.
    Numbers go to ``memory``, over a former copy there. Of DTensors, this rank's part is copied.
    """
    tensors = {id(tensor): tensor for tensor in _tensors_in(state)}
    parts = {key: tensor if (part := local_part(tensor)) is None else part for key, tensor in tensors.items()}
    plain = [part for part in parts.values() if _has_plain_memory(part)]
    storages = _copies_of({storage_key(part): part.untyped_storage() for part in plain}, memory)
    # deepcopy takes what is in its memo as copied. It keeps the order and the attributes of a module's state_dict.
    memo: dict[int, Any] = {}
    for key, tensor in tensors.items():
        part = parts[key]
        if _has_plain_memory(part):
            copy_of = torch.empty(0, dtype=part.dtype, device="cpu")
            copy_of.set_(storages[storage_key(part)], part.storage_offset(), part.size(), part.stride())
        else:
            copy_of = part.detach().clone() if part.device.type == "meta" else part.detach().to("cpu", copy=True)
        if part is not tensor:
            memo[key] = with_local_part(tensor, copy_of)
        elif type(tensor) is torch.nn.Parameter:
            memo[key] = torch.nn.Parameter(copy_of, tensor.requires_grad)
        else:
            memo[key] = copy_of.requires_grad_() if tensor.requires_grad else copy_of
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
    """Memory that is made once and used for each copy: most of the time that a first copy takes goes into making it."""

    def __init__(self) -> None:
        self._bytes = np.empty(0, dtype=np.uint8)
        self._pinned: list[Bytes] = []

    def take(self, sizes: Sequence[int], on_gpu: bool) -> list[Bytes]:
        """Memory for some parts, with what was in it before.

        ``sizes`` are in bytes. With ``on_gpu``, the memory is pinned: a GPU is to write to it directly.
        """
        if on_gpu:
            if [len(part) for part in self._pinned] != list(sizes):
                self._pinned = []  # the old ones go before the new ones are made
                self._pinned = [part.numpy() for part in pinned(sizes)]
            return self._pinned
        ends = list(accumulate(size + -size % _ALIGNMENT for size in sizes))
        if len(self._bytes) < (ends or [0])[-1]:
            self._bytes = np.empty(0, dtype=np.uint8)
            self._bytes = np.empty(ends[-1], dtype=np.uint8)
        return [self._bytes[start : start + size] for start, size in zip([0, *ends], sizes, strict=False)]


def _copies_of(storages: Mapping[int, torch.UntypedStorage], memory: Memory) -> dict[int, torch.UntypedStorage]:
    """Copy storages; the result has the same keys."""
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
    """Copy the second of each pair into the first, by some threads: the other ranks soon wait for this one anyway."""
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
    """Something that is being written.

    Attributes:
        failure: Why it could not be written, once it has ended.
        is_told: Whether the failure was raised somewhere.
    """

    def __init__(self, path: str, do: Callable[[], None]) -> None:
        self.failure: StoreError | None = None
        self.is_told = False
        self._path, self._do = path, do
        self._steps = activity.total_steps
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
            activity.keep_steps(self._steps)
        except Exception as error:
            cause = error if isinstance(error, StoreError) else store_error("write", self._path, error)
            self.failure = StoreError(f"saving {self._path} in the background failed: {cause}")
            self.failure.__cause__ = error
            _log.warning("%s", self.failure)
        finally:
            del self._do  # and with it the copy of the state


def start(path: str, state: Mapping[str, Any], put: Callable[[dict[str, Any]], None]) -> Write:
    """Copy a state, and have it written in the background; what was written before must have ended: :func:`finish`."""
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

    def __init__(self, write: Write | None, *, settled: bool = False) -> None:
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
        """Return whether this rank has nothing more to write, whatever the outcome here or on other ranks."""
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


def start_saving(write: Write | None) -> SaveHandle:
    """Return the handle of a save that all ranks have just begun."""
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
        finish()
        return
    failure = _exchanged(None)
    if _handle is not None and not _handle._settled:
        _handle._settle(failure)
    _handle = None
    if failure is not None:
        raise StoreError(failure)


def _exchanged(write: Write | None) -> str | None:
    """Why the save of any rank failed; collective."""
    failure = _ended(write)
    texts = allgather_object(None if failure is None else str(failure), name="spark_hvd.checkpoint.outcome")
    return next((text for text in texts if text is not None), None)


def _ended(write: Write | None) -> StoreError | None:
    untold = ended()
    return untold if write is None or write.failure is None else write.failure
