"""The arguments of a model: batches of tensors, or results of the user's collate function on rows of similar length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from spark_hvd.data.readers.dataset import Column, listed
from spark_hvd.data.readers.errors import DataError, refuse_nulls
from spark_hvd.data.readers.tensors import to_tensor
from spark_hvd.data.readers.values import decoded, tensor_of, text_of
from spark_hvd.estimators.errors import ModelError
from spark_hvd.estimators.training.inputs import TensorSpec, stacked
from spark_hvd.transport.host.pages import moved


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of a model for ``rows`` rows."""

    rows: int
    positional: Sequence[Any] = ()
    named: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        named = [f"{name}={_described(value)}" for name, value in self.named.items()]
        return ", ".join([*map(_described, self.positional), *named])


def _described(value: Any) -> str:
    if hasattr(value, "shape"):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    return f"{type(value).__name__} of {len(value)}" if hasattr(value, "__len__") else repr(value)


class ModelFeed(Protocol):
    """Turns Arrow batches (structs with a field for each of ``columns``) into calls of the model."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns, in the order of the struct's fields."""

    def windows(self, batches: Iterator[pa.Array]) -> Iterator[pa.Array]:
        """Group the rows into windows, within which :meth:`calls` may reorder them."""

    def calls(self, window: pa.Array, size: int, device: torch.device) -> tuple[Iterator[Arguments], Any]:
        """Return calls of at most ``size`` rows, and the order of their rows in the window; None if unchanged."""


@dataclass(frozen=True)
class TensorFeed:
    """One tensor for each column.

    Inputs and arguments have the order of the struct's fields. Without ``names``, the model takes them by position.
    ``what`` names the action in messages.
    """

    inputs: tuple[TensorSpec, ...]
    decoders: Mapping[str, Callable[[bytes], Any]]
    names: tuple[str, ...] = ()
    what: str = "transform"

    @property
    def columns(self) -> tuple[str, ...]:
        """See :class:`ModelFeed`."""
        return tuple(spec.column.name for spec in self.inputs)

    def windows(self, batches: Iterator[pa.Array]) -> Iterator[pa.Array]:
        """See :class:`ModelFeed`."""
        return batches

    def calls(self, window: pa.Array, size: int, device: torch.device) -> tuple[Iterator[Arguments], None]:
        """See base class.

        Raises:
            DataError: A column has nulls, or lists of different lengths; for decoded values, the iterator raises it.
        """
        columns = [
            array if self._grows(spec.column) else feature(array, spec, self.decoders, self.what)
            for array, spec in zip(window.flatten(), self.inputs, strict=True)
        ]
        return self._calls(columns, len(window), size, device), None

    def _grows(self, column: Column) -> bool:
        """Return whether values take much more memory than in Arrow, so that only one call's are created at a time."""
        return column.name in self.decoders or column.encoding == "sparse"

    def _calls(self, window: list[Any], rows: int, size: int, device: torch.device) -> Iterator[Arguments]:
        shapes: list[tuple[int, ...]] = []
        for at in range(0, rows, size):
            count = min(size, rows - at)
            columns = [values[at : at + size] for values in window]
            columns = [
                feature(values, spec, self.decoders, self.what) if isinstance(values, pa.Array) else values
                for values, spec in zip(columns, self.inputs, strict=True)
            ]
            shapes = shapes or [tuple(column.shape[1:]) for column in columns]
            for spec, column, shape in zip(self.inputs, columns, shapes, strict=True):
                if column.shape[1:] != shape:
                    raise DataError(
                        f"column {spec.column.name!r} in {self.what} has shape {tuple(column.shape[1:])} in row {at}, "
                        f"but {shape} in row 0: all rows need the same shape"
                    )
            tensors = [spec.of(column) for spec, column in zip(self.inputs, columns, strict=True)]
            tensors = stacked(self.inputs, tensors, device)
            if self.names:
                yield Arguments(count, named=dict(zip(self.names, tensors, strict=True)))
            else:
                yield Arguments(count, tensors)


def feature(array: pa.Array, spec: TensorSpec, decoders: Mapping[str, Callable[[bytes], Any]], what: str) -> Any:
    """Return a feature's values (rows, *shape), or text as an array of str; ``what`` names the action in messages.

    Raises:
        DataError: There are nulls, or rows of different shapes.
    """
    column = spec.column
    if column.name not in decoders and column.dtype == "object":
        return text_of(array, column.name, what)
    if column.name not in decoders:
        return to_tensor(array, column, what)
    if not len(array):
        return torch.empty(0, *(column.shape or ()), device="cpu")
    values = decoded(array, column.name, decoders[column.name], what)
    return tensor_of(values, replace(column, dtype="object", shape=None), what)


@dataclass(frozen=True)
class CollatedFeed:
    """The results of ``collate`` on lists of values, one list for each column.

    Attributes:
        columns: Names of the columns, in the order of the struct's fields.
        collate: Returns a tuple of arguments, a mapping of them by name, or a single argument.
        names: Names of collate's arguments; none if it takes the lists by position.
        window: Number of rows among which rows of similar length form batches; None for the rows that Spark sends
            together.
    """

    columns: tuple[str, ...]
    collate: Callable[..., Any]
    names: tuple[str, ...] = ()
    window: int | None = None

    def windows(self, batches: Iterator[pa.Array]) -> Iterator[pa.Array]:
        """See :class:`ModelFeed`."""
        if self.window is None:
            yield from batches
            return
        pending: list[pa.Array] = []
        for batch in batches:
            pending.append(batch)
            while sum(map(len, pending)) >= self.window:
                joined = pa.concat_arrays(pending)
                yield joined[: self.window]
                pending = [joined[self.window :]]
        if any(len(each) for each in pending):
            yield pa.concat_arrays(pending)

    def calls(self, window: pa.Array, size: int, device: torch.device) -> tuple[Iterator[Arguments], Any]:
        """See base class.

        Raises:
            DataError: A column has nulls.
        """
        columns = window.flatten()
        for name, column in zip(self.columns, columns, strict=True):
            refuse_nulls(name, column.null_count, f"{len(column)} rows", "predict")
        order = _longest_first(columns)
        if order is not None:
            columns = [column.take(pa.array(order)) for column in columns]
        return self._calls(columns, len(window), size, device), order

    def _calls(self, columns: list[pa.Array], rows: int, size: int, device: torch.device) -> Iterator[Arguments]:
        for at in range(0, rows, size):
            values = [column[at : at + size].to_pylist() for column in columns]
            count = min(size, rows - at)
            try:
                if self.names:
                    arguments = self.collate(**dict(zip(self.names, values, strict=True)))
                else:
                    arguments = self.collate(*values)
            except Exception as error:
                raise ModelError(
                    f"collate failed on {count} values of {listed(self.columns)}: {type(error).__name__}: {error}\n"
                    "It is called with a list of values for each column, and must return the model's arguments"
                ) from error
            arguments = _moved(arguments, device)
            if isinstance(arguments, Mapping):
                yield Arguments(count, named=dict(arguments.items()))
            else:
                yield Arguments(count, arguments if isinstance(arguments, tuple) else (arguments,))


def _longest_first(columns: Sequence[pa.Array]) -> Any:
    """Return the order of the rows by the length of their text, bytes and lists; None if they have no length.

    The longest rows come first, so a batch that takes too much memory fails at once, and the others reuse its memory.
    """
    lengths = [each for each in map(_lengths, columns) if each is not None]
    if not lengths or len(columns[0]) < 2:
        return None
    return np.argsort(-sum(lengths), kind="stable")


def _lengths(column: pa.Array) -> Any:
    kind = column.type
    if any(test(kind) for test in (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary)):
        return pc.binary_length(column).to_numpy().astype(np.int64)
    if any(test(kind) for test in (pa.types.is_list, pa.types.is_large_list)):
        return pc.list_value_length(column).to_numpy().astype(np.int64)
    return None


def _moved(value: Any, device: torch.device) -> Any:
    """Return the same structure, with tensors on ``device``."""
    if isinstance(value, torch.Tensor):
        return moved(value, device)
    if isinstance(value, Mapping):
        return {name: _moved(each, device) for name, each in value.items()}
    if type(value) in (list, tuple) and device.type != "cpu":
        return type(value)(_moved(each, device) for each in value)
    return value
