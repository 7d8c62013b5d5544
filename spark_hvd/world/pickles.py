"""Pickles of code that keeps the name of its file, so that a traceback made elsewhere shows the user's own lines."""

from __future__ import annotations

import io
import sys
from collections import ChainMap
from types import CodeType
from typing import Any, ClassVar

import cloudpickle

_NAMELESS = "<dynamic-code>"


def _with_its_file(code: CodeType) -> tuple[Any, tuple[Any, ...]]:
    make, arguments = cloudpickle.CloudPickler.dispatch_table[CodeType](code)
    return make, tuple(code.co_filename if each == _NAMELESS else each for each in arguments)


def _as_bytes(storage: Any) -> Any:
    torch = sys.modules["torch"]
    return torch.storage.TypedStorage(wrap_storage=storage, dtype=torch.uint8, _internal=True).__reduce__()


class SourcePickler(cloudpickle.CloudPickler):  # type: ignore[misc] # cloudpickle has no types
    """cloudpickle's, which from 3.1.3 on calls the file of all code "<dynamic-code>"."""

    dispatch_table: ClassVar = ChainMap({CodeType: _with_its_file}, cloudpickle.CloudPickler.dispatch_table)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if (torch := sys.modules.get("torch")) is not None:
            # Storages of float8 and other young dtypes, whose own pickles torch cannot read.
            self.dispatch_table.setdefault(torch.UntypedStorage, _as_bytes)
        super().__init__(*args, **kwargs)


def dumps(value: Any) -> bytes:
    """Pickle ``value``; functions and classes of ``__main__`` by value.

    Raises:
        Exception: whatever it cannot be pickled for.
    """
    file = io.BytesIO()
    SourcePickler(file).dump(value)
    return file.getvalue()
