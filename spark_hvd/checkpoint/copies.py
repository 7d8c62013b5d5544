"""A copy of a state in memory of the CPU: what is written in the background must not change with training."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from spark_hvd.transport.host.pages import pinned
from spark_hvd.transport.torch_private import local_part, storage_key, with_local_part

Bytes = npt.NDArray[np.uint8]

_ALIGNMENT = 64
"""Bytes. Each copied storage begins at a multiple."""
_PIECE = 8 << 20
"""Bytes that a thread copies at once."""
_THREADS = 4


def copied(state: Mapping[str, Any], memory: Memory) -> dict[str, Any]:
    """A copy of ``state`` that shares no memory with it, with tensors on the CPU.

    What shares memory in ``state``, such as tied weights, does so in the copy: it is written once, as without a copy.

    Args:
        state: What :func:`spark_hvd.checkpoint.format.check_plain` lets pass, and DTensors. Of those this rank's part
            is copied.
        memory: Where the numbers go. A former copy there is overwritten.
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
            copy_of = torch.empty(0, dtype=part.dtype)
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

        Args:
            sizes: Bytes of each part.
            on_gpu: Whether a GPU is to write to it directly.
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
            source = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
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
