"""A module in two parts: its weights as safetensors, everything else (code, structure, plain attributes) as a pickle.

Both parts are bytes, for a broadcast or for two files. Loading the pickle runs code: only unpack what you trust. The
weights are plain data, under their names in ``state_dict`` if they have one.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import safetensors.torch
import torch
from torch import nn

from spark_hvd.runner.outcome.payload import UnpicklableError, explain
from spark_hvd.transport.torch_private import storage_key
from spark_hvd.world.pickles import SourcePickler

# Dtypes that safetensors supports; tensors of other dtypes (complex, quantised) stay in the pickle.
_DTYPES = frozenset(
    {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
    | {torch.float16, torch.bfloat16, torch.float32, torch.float64}
)
_INNER = re.compile(r"\._(?:modules|parameters|buffers)\['([^']+)'\]")


@dataclass(frozen=True, slots=True)
class PackedModule:
    """The result of :func:`pack`: a pickle of everything except the weights, and the weights as safetensors."""

    structure: bytes = field(repr=False)
    weights: bytes = field(repr=False)

    def digest(self) -> str:
        """Return the SHA-256 of the content, in hex: equal for equal bytes."""
        content = hashlib.sha256(len(self.structure).to_bytes(8, "little"))
        content.update(self.structure)
        content.update(self.weights)
        return content.hexdigest()


@dataclass(frozen=True, slots=True)
class _Entry:
    """Location of a tensor's values: all of ``key``, or a part of it that other tensors share."""

    key: str
    kind: str
    requires_grad: bool
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    offset: int | None
    """First element in the storage ``key``, which other tensors share; None if the values are its own."""


def pack(obj: Any, what: str = "model") -> PackedModule:
    """Separate weights and pickle of ``obj``, without changing it.

    Tied weights and views of one storage stay tied. ``requires_grad``, buffers (persistent or not) and tensors in plain
    attributes are kept, gradients are not. Tensors on a device are copied to the CPU.

    Args:
        obj: A ``torch.nn.Module`` (a LightningModule, a loss), a TorchScript module, an optimizer, or anything that
            holds these. Pack objects that belong together, such as a model and its optimizer, in one dict.
        what: The name of ``obj`` for messages.

    Raises:
        UnpicklableError: naming the attribute that cannot be pickled.
    """
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    try:
        pickler.dump(obj)
    except Exception as error:
        reason = _INNER.sub(r".\1", explain([(what, obj)], error))
        raise UnpicklableError(
            f"cannot pickle {what}: {reason}\nCreate it where it is used, for example in forward, or exclude it from "
            "the pickle with __getstate__."
        ) from error
    entries, values = _entries(pickler.tensors, _names(obj))
    structure = pickle.dumps((entries, buffer.getvalue()), protocol=pickle.HIGHEST_PROTOCOL)
    return PackedModule(structure, safetensors.torch.save(values))


def unpack(packed: PackedModule) -> Any:
    """Restore the packed object, on the CPU.

    Raises:
        ModuleNotFoundError, AttributeError: Its code is missing here, or is of another version.
        Exception: the bytes are damaged (pickle's and safetensors' own errors).
    """
    return _restored(packed.structure, safetensors.torch.load(packed.weights))


def unpack_file(structure: bytes, weights: str) -> Any:
    """Do :func:`unpack` with the weights in a file, whose pages processes share until one of them writes."""
    return _restored(structure, safetensors.torch.load_file(weights))


def _restored(structure: bytes, values: dict[str, torch.Tensor]) -> Any:
    entries, body = _MovedNames(io.BytesIO(structure)).load()
    return _Unpickler(io.BytesIO(body), entries, values).load()


class _Pickler(SourcePickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[torch.Tensor] = []  # kept alive, so that ids are not reused
        self._numbers: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> tuple[int, dict[str, Any]] | None:
        if type(obj) not in (torch.Tensor, nn.Parameter) or obj.layout is not torch.strided:
            return None
        if obj.dtype not in _DTYPES or obj.device.type == "meta":
            return None
        if id(obj) not in self._numbers:
            self._numbers[id(obj)] = len(self.tensors)
            self.tensors.append(obj)
        return self._numbers[id(obj)], vars(obj)  # some tensors carry attributes, such as nn.Buffer's

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (torch.jit.ScriptModule, torch.jit.ScriptFunction)):
            buffer = io.BytesIO()
            with _deprecated_allowed():
                torch.jit.save(obj, buffer)
            return _load_script, (buffer.getvalue(), getattr(obj, "training", True))
        return super().reducer_override(obj)


class _MovedNames(pickle.Unpickler):
    """Also reads pickles from before our files moved: names under the old path are in a room's door, or here."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return super().find_class(module, name)
        except (ImportError, AttributeError):
            if module.startswith("spark_hvd."):
                for door in ("spark_hvd.estimators", "spark_hvd.torch", "spark_hvd.collectives.compression", __name__):
                    with suppress(AttributeError):
                        return super().find_class(door, name)
            raise


class _Unpickler(_MovedNames):
    def __init__(self, file: io.BytesIO, entries: list[_Entry], values: dict[str, torch.Tensor]) -> None:
        super().__init__(file)
        self._entries, self._values = entries, values
        self._made: dict[int, torch.Tensor] = {}

    def persistent_load(self, pid: tuple[int, dict[str, Any]]) -> torch.Tensor:
        number, attributes = pid
        if number not in self._made:
            entry = self._entries[number]
            tensor = _tensor(entry, self._values[entry.key])
            if entry.kind == "parameter":
                tensor = nn.Parameter(tensor, entry.requires_grad)
            else:
                tensor.requires_grad_(entry.requires_grad)
            vars(tensor).update(attributes)
            self._made[number] = tensor
        return self._made[number]


def _entries(tensors: list[torch.Tensor], names: Mapping[int, str]) -> tuple[list[_Entry], dict[str, torch.Tensor]]:
    """Return the location of each tensor's values, and the values by key. Shared storage is kept once."""
    seen_by: dict[int, int] = {}
    for tensor in tensors:
        seen_by[storage_key(tensor)] = seen_by.get(storage_key(tensor), 0) + 1
    entries, values, shared = [], {}, dict[int, str]()
    for number, tensor in enumerate(tensors):
        storage, plain = storage_key(tensor), tensor.detach()
        if own := seen_by[storage] == 1:
            key = names.get(id(tensor), f"tensor.{number}")
            values[key] = plain.cpu().contiguous()
        else:
            key = shared.setdefault(storage, f"storage.{len(shared)}")
            # as bytes: tensors of several dtypes may view it
            values[key] = torch.empty(0, dtype=torch.uint8, device=plain.device).set_(plain.untyped_storage()).cpu()
        entries.append(
            _Entry(
                key,
                "parameter" if isinstance(tensor, nn.Parameter) else "tensor",
                tensor.requires_grad,
                tuple(tensor.shape),
                tensor.stride(),
                str(tensor.dtype).removeprefix("torch."),
                None if own else int(tensor.storage_offset()),
            )
        )
    return entries, values


def _tensor(entry: _Entry, value: torch.Tensor) -> torch.Tensor:
    dtype = getattr(torch, entry.dtype)
    if entry.offset is not None:
        storage = value.untyped_storage()
        return torch.empty(0, dtype=dtype, device="cpu").set_(storage, entry.offset, entry.shape, entry.stride)
    if value.stride() == entry.stride or 0 in entry.stride:  # an expanded tensor becomes contiguous
        return value
    return torch.empty_strided(entry.shape, entry.stride, dtype=dtype, device="cpu").copy_(
        value
    )  # such as channels_last


def _names(obj: Any) -> dict[int, str]:
    """Return the names in a state_dict by the id of the tensor; a dict's values have their key as prefix."""
    parts = obj.items() if isinstance(obj, Mapping) else [("", obj)]
    found: dict[int, str] = {}
    for prefix, part in parts:
        if isinstance(part, nn.Module):
            prefix = f"{prefix}." if prefix else ""
            for name, tensor in (*part.named_parameters(), *part.named_buffers()):
                found.setdefault(id(tensor), f"{prefix}{name}")
    return found


def _load_script(data: bytes, training: bool) -> Any:
    with _deprecated_allowed():
        loaded = torch.jit.load(io.BytesIO(data), map_location="cpu")  # type: ignore[no-untyped-call]
    return loaded.train(training) if isinstance(loaded, torch.jit.ScriptModule) else loaded


@contextmanager
def _deprecated_allowed() -> Iterator[None]:
    """Silence torch's deprecation warning for TorchScript, which it also issues when a module is created."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield
