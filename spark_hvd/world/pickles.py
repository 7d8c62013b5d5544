"""Pickles of code that keeps the name of its file, so that a traceback made elsewhere shows the user's own lines."""

from __future__ import annotations

import io
import pickle
import sys
from collections import ChainMap
from multiprocessing.reduction import ForkingPickler
from types import CodeType, FunctionType
from typing import Any, ClassVar

import cloudpickle

_NAMELESS = "<dynamic-code>"


def _with_its_file(code: CodeType) -> tuple[Any, tuple[Any, ...]]:
    make, arguments = cloudpickle.CloudPickler.dispatch_table[CodeType](code)
    return make, tuple(code.co_filename if each == _NAMELESS else each for each in arguments)


def _as_bytes(storage: Any) -> Any:
    torch = sys.modules["torch"]
    return torch.storage.TypedStorage(wrap_storage=storage, dtype=torch.uint8, _internal=True).__reduce__()


def _alone(tensor: Any) -> Any:
    """A view without the rest of its storage; torch would take a whole bucket for each gradient in it."""
    torch = sys.modules["torch"]
    plain = (
        tensor.layout is torch.strided and tensor.device.type != "meta" and not (tensor.is_quantized or vars(tensor))
    )
    if plain and tensor.nbytes < tensor.untyped_storage().nbytes():
        tensor = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    return tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


def _of_tasks(value: Any) -> Any:
    """Spark's tasks can look up a broadcast, and report what they add to an accumulator. A rank can do neither."""
    raise pickle.PicklingError(f"only Spark's own tasks know a {type(value).__qualname__}")


class SourcePickler(cloudpickle.CloudPickler):  # type: ignore[misc] # cloudpickle has no types
    """cloudpickle's, which from 3.1.3 on calls the file of all code "<dynamic-code>"."""

    dispatch_table: ClassVar = ChainMap({CodeType: _with_its_file}, cloudpickle.CloudPickler.dispatch_table)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if (torch := sys.modules.get("torch")) is not None:
            # Storages of float8 and other young dtypes, whose own pickles torch cannot read.
            self.dispatch_table.setdefault(torch.UntypedStorage, _as_bytes)
            self.dispatch_table.setdefault(torch.Tensor, _alone)
        for name in ("Broadcast", "Accumulator"):
            if (kind := getattr(sys.modules.get("pyspark"), name, None)) is not None:
                self.dispatch_table.setdefault(kind, _of_tasks)
        super().__init__(*args, **kwargs)


def dumps(value: Any) -> bytes:
    """Pickle ``value``; functions and classes of ``__main__`` by value.

    Raises:
        Exception: whatever it cannot be pickled for.
    """
    file = io.BytesIO()
    SourcePickler(file).dump(value)
    return file.getvalue()


def send_by_value() -> None:
    """Have multiprocessing pickle by value what is of ``__main__`` and cannot be found there.

    The functions and classes of a notebook or script came to a rank by value, and its ``__main__`` is another module.
    Without this a pool, or a loader whose workers are spawned, refuses them.
    """
    ForkingPickler.reducer_override = _reduced  # type: ignore[method-assign]


def _reduced(pickler: object, value: Any) -> Any:
    if isinstance(value, (FunctionType, type)) and value.__module__ == "__main__" and not _is_in_main(value):
        return _received, (dumps(value),)
    return NotImplemented


def _is_in_main(value: Any) -> bool:
    found: Any = sys.modules["__main__"]
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is value


def _received(data: bytes) -> Any:
    send_by_value()  # what comes back may be of such a class, too
    return pickle.loads(data)
