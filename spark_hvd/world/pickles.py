"""Pickles code together with the name of its file, so that tracebacks made elsewhere show the user's own lines."""

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


def _reduce_code(code: CodeType) -> tuple[Any, tuple[Any, ...]]:
    make, arguments = cloudpickle.CloudPickler.dispatch_table[CodeType](code)
    return make, tuple(code.co_filename if each == _NAMELESS else each for each in arguments)


def _reduce_storage(storage: Any) -> Any:
    torch = sys.modules["torch"]
    return torch.storage.TypedStorage(wrap_storage=storage, dtype=torch.uint8, _internal=True).__reduce__()


def _reduce_tensor(tensor: Any) -> Any:
    """Reduce a view without the rest of its storage; torch would pickle a whole bucket for each gradient in it."""
    torch = sys.modules["torch"]
    plain = (
        tensor.layout is torch.strided and tensor.device.type != "meta" and not (tensor.is_quantized or vars(tensor))
    )
    if plain and tensor.nbytes < tensor.untyped_storage().nbytes():
        tensor = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    return tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


def _refuse(value: Any) -> Any:
    """Refuse a broadcast or an accumulator: a rank can use neither, unlike Spark's tasks."""
    raise pickle.PicklingError(f"only Spark's own tasks know a {type(value).__qualname__}")


class SourcePickler(cloudpickle.CloudPickler):  # type: ignore[misc] # cloudpickle has no types
    """cloudpickle's pickler, which since 3.1.3 would call every code object's file "<dynamic-code>"."""

    dispatch_table: ClassVar = ChainMap({CodeType: _reduce_code}, cloudpickle.CloudPickler.dispatch_table)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if (torch := sys.modules.get("torch")) is not None:
            # float8 and other new dtypes: torch cannot read its own pickles of such storages.
            self.dispatch_table.setdefault(torch.UntypedStorage, _reduce_storage)
            self.dispatch_table.setdefault(torch.Tensor, _reduce_tensor)
        for name in ("Broadcast", "Accumulator"):
            if (kind := getattr(sys.modules.get("pyspark"), name, None)) is not None:
                self.dispatch_table.setdefault(kind, _refuse)
        super().__init__(*args, **kwargs)


def dumps(value: Any) -> bytes:
    """Pickle ``value``; functions and classes of ``__main__`` are pickled by value.

    Raises:
        Exception: Any error that pickling raises.
    """
    file = io.BytesIO()
    SourcePickler(file).dump(value)
    return file.getvalue()


def send_by_value() -> None:
    """Have multiprocessing pickle by value what belongs to ``__main__`` but cannot be found there.

    Functions and classes of a notebook or script reach a rank by value, where ``__main__`` is another module. Without
    this, pools, and loaders whose workers are spawned, refuse them.
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
    send_by_value()  # what comes back may also be of such a class
    return pickle.loads(data)
