"""A checkpoint in one file of a store: tensors and plain data, which are written completely and checked when read."""

from __future__ import annotations

import io
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from spark_hvd.collectives.objects import broadcast_object
from spark_hvd.context.basics import rank
from spark_hvd.context.global_state import is_initialized
from spark_hvd.store.errors import CheckpointError
from spark_hvd.world.activity import activity

if TYPE_CHECKING:
    from spark_hvd.store import Store

T = TypeVar("T")
FORMAT = 1
_CHUNK = 64 << 20
"""Bytes that ranks send each other at once, which limits the copies in memory."""
_PLAIN = (
    bool, int, float, complex, str, bytes, bytearray, type(None), torch.Size, torch.dtype, torch.device,
    torch.Tensor, torch.nn.Parameter,
)  # fmt: skip
"""Types that torch loads without running code. They must match exactly: numpy.float64 is a subclass of float, but the
unpickler refuses it."""


@dataclass(frozen=True)
class Found:
    """A checkpoint that was read: the path of its file, the content, and the state in it."""

    path: str
    data: bytes
    state: dict[str, Any]


class NewerFormatError(CheckpointError):
    """A newer version of spark_hvd wrote the checkpoint."""


def write(store: Store, path: str, state: Mapping[str, Any], check: Callable[[], None] = lambda: None) -> None:
    """Write ``state``, which may only hold dicts, lists, numbers, text and tensors.

    ``check`` is called before the new file replaces a previous one, which remains if it raises an exception.

    Raises:
        TypeError: ``state`` holds something else, which could not be read again.
        StoreError: The file cannot be written. A previous file of that name is unchanged.
    """
    check_state(state)
    with store.writing(path) as file:
        torch.save({"format": FORMAT, **state}, file)
        check()


def read(store: Store, path: str, otherwise: str, parts: Mapping[str, type] | None = None) -> Found:
    """Read a checkpoint; see :func:`unpack`.

    Raises:
        StoreError: The file cannot be read.
        CheckpointError: The checkpoint is damaged, or, as NewerFormatError, has a newer format.
    """
    data = store.read_bytes(path)
    return Found(path, data, unpack(data, path, otherwise, parts))


def unpack(
    data: bytes, path: str, otherwise: str, parts: Mapping[str, type] | None = None, *, tested: bool = False
) -> dict[str, Any]:
    """Return the state in a file's content, on the CPU. Only tensors and plain data are unpickled, so no code runs.

    Args:
        data: The content.
        path: The file, for messages.
        otherwise: The next step, for messages.
        parts: Keys that the state must have, with their types.
        tested: Whether the checksums are known to be right.

    Raises:
        CheckpointError: The checkpoint is damaged, or, as NewerFormatError, has a newer format.
    """
    try:
        if not tested and (wrong := zipfile.ZipFile(io.BytesIO(data)).testzip()) is not None:
            raise ValueError(f"wrong checksum of {wrong}")  # torch itself accepts any bytes as a tensor
        state: dict[str, Any] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        format_ = state["format"]
        for part, kind in {"format": int, **(parts or {})}.items():
            if type(state[part]) is not kind:
                raise TypeError(f"its {part!r} is not of type {kind.__name__}")
    except Exception as error:
        raise CheckpointError(
            f"the checkpoint {path} ({len(data):,} bytes) is damaged: {type(error).__name__}: "
            f"{(str(error).splitlines() or [''])[0]}. {otherwise}"
        ) from error
    if format_ > FORMAT:
        raise NewerFormatError(
            f"the checkpoint {path} has format {format_}, written by a newer spark_hvd; this one reads formats up "
            f"to {FORMAT}. Update spark_hvd. {otherwise}"
        )
    return state


def on_rank_0(do: Callable[[], T], name: str = "spark_hvd.checkpoint") -> T:
    """Return on all ranks what ``do`` returns on rank 0. Without a world, just call it.

    Ranks match their calls by ``name``, which only one thread may use at a time.

    Raises:
        Exception: The error of ``do`` on rank 0. Raised on all ranks.
    """
    if not is_initialized():
        return do()
    outcome: tuple[bool, Any] = (True, None)
    if rank() == 0:
        try:
            outcome = (True, do())
        except Exception as error:
            outcome = (False, error)
    done, value = broadcast_object(outcome, name=name)
    if not done:
        raise value
    return cast(T, value)


def read_by_rank_0(choose: Callable[[], Found | None]) -> dict[str, Any] | None:
    """Return on all ranks the state that rank 0 chooses and reads; None if it finds none. Without a world, just read.

    Only one rank chooses, because hosts may briefly list a folder differently. Only one rank reads, because a store
    serves one reader better than a thousand.

    Raises:
        Exception: The error of ``choose`` on rank 0. Raised on all ranks.
    """
    mine: list[Found] = []

    def chosen_file() -> tuple[str, int] | None:
        found = choose()
        if found is None:
            return None
        mine.append(found)
        return found.path, len(found.data)

    file = on_rank_0(chosen_file)
    if file is not None:
        activity.load_steps()
    if file is None or not is_initialized():
        return mine[0].state if mine else None
    path, length = file
    parts = []
    for start in range(0, length, _CHUNK):
        part = mine[0].data[start : start + _CHUNK] if mine else b""
        parts.append(broadcast_object(part, name="spark_hvd.checkpoint.data"))
    return mine[0].state if mine else unpack(b"".join(parts), path, "", tested=True)


def check_state(state: Mapping[str, Any]) -> None:
    """Check that :func:`write` can write ``state``.

    Raises:
        TypeError: ``state`` holds something else than dicts, lists, numbers, text and tensors.
    """
    for name, part in state.items():
        check_plain(part, name)


def check_plain(value: Any, where: str) -> None:
    """Check that a checkpoint can hold ``value``, which errors call ``where``.

    Raises:
        TypeError: Part of ``value`` could not be read again without running code.
    """
    if type(value) in _PLAIN:
        return
    if type(value) in (dict, OrderedDict):
        for key, item in value.items():
            check_plain(key, f"a key of {where}")
            check_plain(item, f"{where}[{key!r}]")
    elif type(value) in (list, tuple, set):
        for number, item in enumerate(value):
            check_plain(item, f"{where}[{number}]")
    else:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        remedy = (
            "a DTensor has a part on each rank: use save_sharded"
            if hasattr(value, "device_mesh")
            else "pass its state_dict(), or plain values, such as .item() or .tolist() of a numpy value"
        )
        raise TypeError(f"{where} is a {kind}: expected tensors, numbers, text, and dicts and lists of them; {remedy}")
