"""Applies the user's functions to tables, decoders and ``transformation_fn``, and checks their results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import torch

from spark_hvd.data.readers.batches import Blocks, Layout
from spark_hvd.data.readers.dataset import Column, listed
from spark_hvd.data.readers.errors import DataError, refuse_nulls
from spark_hvd.data.readers.reader import Batch, ReaderSpec
from spark_hvd.data.readers.tensors import to_tensor


def columns_read(spec: ReaderSpec) -> tuple[Column, ...]:
    """Return the columns that the files must have: all but those that ``transformation_fn`` adds.

    Raises:
        DataError: A column is not in the data set.
    """
    added = {field[0] for field in spec.edit_fields} - {column.name for column in spec.dataset.columns}
    return tuple(spec.dataset.column(name) for name in spec.columns if name not in added)


def columns_yielded(spec: ReaderSpec) -> tuple[Column, ...]:
    """Return the columns of batches: those that are read and not removed, and those that ``transformation_fn`` adds.

    Raises:
        DataError: A column is not in the data set, or ``edit_fields`` has a dtype that is not numeric.
    """
    for name, dtype, _, _ in spec.edit_fields:
        if np.dtype(dtype).kind not in "biufO":
            kind = np.dtype(dtype)
            raise DataError(f"edit_fields has column {name!r} of {kind}, which cannot become a tensor: use numbers")
    edited = {
        name: Column(name, np.dtype(dtype).name, None if shape is None or None in shape else tuple(shape))
        for name, dtype, shape, _ in spec.edit_fields
    }
    names = [name for name in spec.columns if name not in spec.removed_fields]
    names += [name for name in edited if name not in spec.columns]
    return tuple(edited.get(name) or spec.dataset.column(name) for name in names)


def may_have_nulls(spec: ReaderSpec, columns: Sequence[Column]) -> tuple[str, ...]:
    """Return the columns whose nulls ``transformation_fn`` may fill. Any that it leaves are refused afterwards."""
    if spec.transformation_fn is None:
        return ()
    read = [each for each in columns if each.name in spec.columns and each.name not in spec.decoders]
    return tuple(each.name for each in read if each.encoding == "plain")


class Values:
    """Turns tables into blocks, with the user's functions if there are any."""

    def __init__(self, spec: ReaderSpec, layout: Layout) -> None:
        self._spec = spec
        self._layout = layout
        self._read = columns_read(spec)
        self._nullable = may_have_nulls(spec, self._read)

    def blocks_of(self, table: pa.Table, where: str) -> Blocks:
        """Return the blocks of ``table``. ``where`` names the file and the row group in errors.

        Raises:
            DataError: Values do not fit their column, or a function failed or returned an unexpected value.
        """
        if self._spec.transformation_fn is None and not self._spec.decoders:
            return self._layout.blocks_of(table, where)
        return self._layout.blocks_of_tensors(self.columns_of(table, where))

    def columns_of(self, table: pa.Table, where: str) -> Batch:
        """Return the columns of ``table``: tensors, and arrays of str for columns of text.

        Raises:
            DataError: As :meth:`blocks_of`.
        """
        spec = self._spec
        cells = {column.name: self._cells(table.column(column.name), column, where) for column in self._read}
        if spec.transformation_fn is not None:
            frame = pd.DataFrame({name: _series(values) for name, values in cells.items()})
            cells = self._transformed(frame, spec.transformation_fn, where)
            _check_filled(table, cells, where)
        return {
            each.name: tensor_of(cells[each.name], each, where, text=each.name in spec.text)
            for each in self._layout.columns
        }

    def _cells(self, array: pa.ChunkedArray, column: Column, where: str) -> Any:
        """Return a tensor if possible; else the decoder's results, text, bytes, or values that include nulls."""
        decoder = self._spec.decoders.get(column.name)
        if decoder is None:
            if column.name in self._spec.text and self._spec.transformation_fn is None and is_text(array.type):
                return text_of(array, column.name, where)
            plain = column.dtype != "object" and not (array.null_count and column.name in self._nullable)
            return to_tensor(array, column, where) if plain else array.to_pandas()
        return decoded(array, column.name, decoder, where)

    def _transformed(
        self, frame: pd.DataFrame, function: Callable[[pd.DataFrame], pd.DataFrame], where: str
    ) -> dict[str, Any]:
        rows = len(frame)
        try:
            result = function(frame)
        except Exception as error:
            raise DataError(f"transformation_fn failed on {where}: {type(error).__name__}: {error}") from error
        if not isinstance(result, pd.DataFrame):
            raise DataError(f"transformation_fn returned {type(result).__name__}, expected a pandas DataFrame")
        if len(result) != rows:
            raise DataError(
                f"transformation_fn returned {len(result)} rows for {rows} of {where}: it must keep their number, "
                "because the steps of an epoch are counted before. Filter the DataFrame before fit instead"
            )
        missing = [column.name for column in self._layout.columns if column.name not in result.columns]
        if missing:
            raise DataError(
                f"transformation_fn returned no column {listed(missing)}, but {listed(map(str, result.columns))}: list "
                "columns that it adds in transformation_edit_fields, and columns that it drops in "
                "transformation_removed_fields"
            )
        return {column.name: result[column.name] for column in self._layout.columns}


def decoded(array: pa.Array | pa.ChunkedArray, name: str, decoder: Callable[[bytes], Any], where: str) -> list[Any]:
    """Apply a decoder to the values of a column.

    Raises:
        DataError: There are nulls, or the decoder fails.
    """
    refuse_nulls(name, array.null_count, f"{len(array)} rows", where)
    results = []
    for row, value in enumerate(array.to_pylist()):
        try:
            results.append(decoder(value))
        except Exception as error:
            raise DataError(
                f"the decoder of column {name!r} failed on row {row} of {where}, {len(value)} bytes: "
                f"{type(error).__name__}: {error}"
            ) from error
    return results


def _check_filled(table: pa.Table, cells: Mapping[str, Any], where: str) -> None:
    """Check that ``transformation_fn`` has replaced the nulls of ``table`` by values that are not NaN."""
    for name, array in zip(table.column_names, table.columns, strict=True):
        if array.null_count and name in cells:
            left = int((array.is_null().to_numpy() & pd.isna(cells[name]).to_numpy()).sum())
            remedy = (
                f"fill them there, e.g. frame[{name!r}].fillna(0), or drop these rows before fit, e.g. "
                f"df.na.drop(subset=[{name!r}])"
            )
            refuse_nulls(name, left, f"{len(array)} rows after transformation_fn", where, remedy=remedy)


def _series(values: Any) -> Any:
    """Return the cells of a DataFrame's column. A row of several numbers becomes an array in one cell."""
    if isinstance(values, torch.Tensor):
        return values.numpy() if values.dim() == 1 else pd.Series(list(values.numpy()), dtype=object)
    return pd.Series(values, dtype=object) if isinstance(values, list) else values


def is_text(kind: pa.DataType) -> bool:
    """Return whether values of this type are text."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return any(test(kind) for test in (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view))


def text_of(array: pa.Array | pa.ChunkedArray, name: str, where: str) -> Any:
    """Return text as an array of str, (rows,).

    Raises:
        DataError: There are nulls.
    """
    refuse_nulls(name, array.null_count, f"{len(array)} rows", where)
    text = array.cast(pa.string())
    return (text.combine_chunks() if isinstance(text, pa.ChunkedArray) else text).to_numpy(zero_copy_only=False)


def tensor_of(values: Any, column: Column, where: str, *, text: bool = False) -> Any:
    """Return cells as the tensor that ``column`` describes. A dtype "object" or a shape None accepts any.

    With ``text``, cells that are all str become an array of str.

    Raises:
        DataError: The cells are not numbers, or are arrays of different shapes or of another shape than the column's.
    """
    if isinstance(values, torch.Tensor | np.ndarray):
        return values
    if text and all(isinstance(value, str) for value in values):
        return np.array(list(values), object)
    if isinstance(values, pd.Series) and values.dtype != object:
        return to_tensor(pa.array(values.to_numpy(), from_pandas=False), column, where)
    arrays = [np.asarray(value) for value in values]
    name = f"column {column.name!r} in {where}"
    for row, array in enumerate(arrays):
        if array.dtype == object or array.dtype.kind in "SUV":
            raise DataError(f"{name} has {_shown(values, row)} in row {row}: expected numbers or an array of them")
        if array.shape != arrays[0].shape:
            raise DataError(
                f"{name} has shape {array.shape} in row {row}, but {arrays[0].shape} in row 0: give all rows one shape"
            )
    stacked = np.stack(arrays)
    if column.shape is not None and stacked.shape[1:] != column.shape:
        raise DataError(f"{name} has rows of shape {stacked.shape[1:]}, expected {column.shape}")
    tensor = torch.from_numpy(stacked)
    return tensor if column.dtype == "object" else tensor.to(getattr(torch, column.dtype))


def _shown(values: Any, row: int) -> str:
    text = repr(values[row] if isinstance(values, list) else values.iloc[row])
    return text if len(text) <= 60 else text[:57] + "..."
