"""Reads a file as part of its table: finds columns by ID or name, widens types, adds defaults, drops deleted rows."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """Return a schema in which text, bytes, lists and dates have one type each.

    The files of a table may store these in different ways, and Arrow's functions do not support all of them.
    """
    return pa.schema([field.with_type(plain_type(field.type)) for field in schema])


def plain_type(kind: pa.DataType) -> pa.DataType:
    """Return the type of a column in :func:`plain_schema`."""
    types = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return plain_type(kind.storage_type)
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return plain_type(kind.value_type)
    if types.is_string_view(kind) or types.is_large_string(kind):
        return pa.string()
    if types.is_binary_view(kind) or types.is_large_binary(kind):
        return pa.binary()
    return pa.date32() if types.is_date64(kind) else type_of_types(kind, plain_type)


def type_of_types(kind: pa.DataType, change: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """Return a list, struct or map type with ``change`` applied to its inner types; large lists become lists.

    Other types are returned unchanged.
    """
    types = pa.types

    def changed(field: pa.Field) -> pa.Field:
        return field.with_type(change(field.type))

    if types.is_list(kind) or types.is_large_list(kind):
        return pa.list_(changed(kind.value_field))
    if types.is_fixed_size_list(kind):
        return pa.list_(changed(kind.value_field), kind.list_size)
    if types.is_map(kind):
        return pa.map_(changed(kind.key_field), changed(kind.item_field))
    return pa.struct(list(map(changed, kind))) if types.is_struct(kind) else kind


ID = b"PARQUET:field_id"
"""The key of a field's ID, in decimal digits, in the metadata that Arrow reads from a file."""
NAMES = b"spark_hvd.names"
"""The key of a field's names, as a JSON list. Files without IDs can only be read if fields have names."""
REQUIRED = b"spark_hvd.required"
"""The key that marks a field of a struct without a default: files must have it."""

_FRAME = "Next: pass the DataFrame that Spark reads from the table"


@dataclass(frozen=True, slots=True)
class TableSchema:
    """The columns of a table. Its files may have them under other names, in narrower types, or not at all.

    Attributes:
        fields: The columns, with plain types whose inner fields are nullable. The metadata of each field, also inside
            structs, tells how to find it in a file.
        defaults: Column name -> value for files without the column. All files have the other columns.
        version: The table's version, for messages.
    """

    fields: pa.Schema
    defaults: Mapping[str, pa.Scalar]
    version: str

    def find(self, name: str, schema: pa.Schema, file: str) -> pa.Field | None:
        """Return the field of a file that holds the column ``name`` of the table.

        The fields of ``schema``, which is the file's, have plain types, and IDs in their metadata.

        Returns:
            The file's field, or None if the file lacks the column, so that its rows have the default.

        Raises:
            ValueError: The file lacks the column, and there is no default; or the file's type cannot be widened to the
                table's.
        """
        wanted = self.fields.field(name)
        try:
            found = _find(wanted, schema)
        except KeyError:
            raise ValueError(
                f"{file} has no field IDs, by which {self.version} finds its columns, and the table has no mapping of "
                f"names. {_FRAME}"
            ) from None
        if found is None:
            if name not in self.defaults:
                raise ValueError(
                    f"{file} has no column {name!r}, for which {self.version} has no default value. {_FRAME}"
                )
            return None
        if isinstance(found.type, pa.BaseExtensionType):
            found = found.with_type(found.type.storage_type)
        try:
            fits = _fits(_renamed(found.type, wanted.type), wanted.type)
            if fits:
                self.convert(name, pa.array([], found.type), found)  # old versions of Arrow add no fields to structs
        except (KeyError, pa.ArrowException):
            fits = False
        if not fits:
            raise ValueError(
                f"column {name!r} is {found.type} in {file} and {wanted.type} in {self.version}: expected a type that "
                f"was widened, or fields that were renamed, dropped or added. {_FRAME}"
            )
        return found

    @property
    def plain(self) -> pa.Schema:
        """The columns without the metadata that tells how to find them."""
        return pa.schema([pa.field(each.name, _table_type(each.type, lambda _: {})) for each in self.fields])

    def default(self, name: str, rows: int) -> pa.Array:
        """Return ``rows`` values of a column for a file that lacks it."""
        value = self.defaults[name]
        return pa.repeat(value, rows) if value.is_valid else pa.nulls(rows, value.type)

    def convert(self, name: str, values: Any, found: pa.Field) -> Any:
        """Convert values of a file's column to the type of the table's column ``name``.

        Args:
            name: The table's column.
            values: An array or chunked array of the file's values.
            found: The file's field, from :meth:`find`.

        Returns:
            The same number of values, in the type of ``fields``.

        Raises:
            pa.ArrowException: A value does not fit into the type.
        """
        wanted = self.fields.field(name).type
        if values.type != found.type:
            values = values.cast(found.type)
        kind = _renamed(found.type, wanted)
        if kind != found.type:
            if isinstance(values, pa.ChunkedArray):
                values = pa.chunked_array([chunk.view(kind) for chunk in values.chunks], kind)
            else:
                values = values.view(kind)
        if kind == wanted:
            return values
        return values.cast(options=pc.CastOptions(wanted, allow_time_truncate=True))


def table_field(field: pa.Field, marks: Callable[[pa.Field], Mapping[bytes, bytes]]) -> pa.Field:
    """Return a field for :class:`TableSchema`; ``marks`` returns the metadata of a field."""
    return pa.field(field.name, _table_type(field.type, marks), metadata=dict(marks(field)))


def names_mark(names: Iterable[str]) -> dict[bytes, bytes]:
    """Return the metadata of a field that is found by its name."""
    return {NAMES: json.dumps(list(names)).encode()}


def _table_type(kind: pa.DataType, marks: Callable[[pa.Field], Mapping[bytes, bytes]]) -> pa.DataType:
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    if pa.types.is_struct(kind):
        return pa.struct([table_field(each, marks) for each in kind])
    if pa.types.is_map(kind):
        return pa.map_(_table_type(kind.key_type, marks), _table_type(kind.item_type, marks))
    if _is_list(kind):
        return pa.list_(pa.field("element", _table_type(kind.value_type, marks)))
    return plain_type(kind)


def _find(wanted: pa.Field, fields: Iterable[pa.Field]) -> pa.Field | None:
    """Return the matching field, or None.

    Raises:
        KeyError: The file has no IDs, and ``wanted`` has no names.
    """
    fields = list(fields)
    number = wanted.metadata.get(ID)
    if number is not None and any(ID in (each.metadata or {}) for each in fields):
        return next((each for each in fields if (each.metadata or {}).get(ID) == number), None)
    names = json.loads(wanted.metadata[NAMES])
    return next((each for each in fields if each.name in names), None)


def _renamed(kind: pa.DataType, wanted: pa.DataType) -> pa.DataType:
    """Return a file's type with the table's names inside structs. Fields that the table lacks get unused names."""
    if pa.types.is_struct(kind) and pa.types.is_struct(wanted):
        fields = list(kind)
        names = {found.name: each for each in wanted if (found := _find(each, fields)) is not None}
        renamed = [
            pa.field(f"\0{number}", each.type)
            if each.name not in names
            else pa.field(names[each.name].name, _renamed(each.type, names[each.name].type))
            for number, each in enumerate(fields)
        ]
        return pa.struct(renamed)
    if pa.types.is_map(kind) and pa.types.is_map(wanted):
        return pa.map_(_renamed(kind.key_type, wanted.key_type), _renamed(kind.item_type, wanted.item_type))
    if _is_list(kind) and _is_list(wanted):
        element = pa.field("element", _renamed(kind.value_type, wanted.value_type))
        return pa.list_(element, kind.list_size) if pa.types.is_fixed_size_list(kind) else pa.list_(element)
    return kind


def _fits(kind: pa.DataType, wanted: pa.DataType) -> bool:
    """Return whether a table's type holds all values of a file's type, as Spark would read them."""
    types = pa.types
    if types.is_struct(kind) and types.is_struct(wanted):
        fields = {each.name: each for each in kind}
        return all(
            _fits(fields[each.name].type, each.type) if each.name in fields else REQUIRED not in each.metadata
            for each in wanted
        )
    if types.is_map(kind) and types.is_map(wanted):
        return _fits(kind.key_type, wanted.key_type) and _fits(kind.item_type, wanted.item_type)
    if _is_list(kind) and _is_list(wanted):
        return _fits(kind.value_type, wanted.value_type)
    if types.is_signed_integer(kind):
        digits = len(str(2 ** (kind.bit_width - 1)))
        return bool(
            (types.is_signed_integer(wanted) and kind.bit_width <= wanted.bit_width)
            or (types.is_float64(wanted) and kind.bit_width <= 32)
            or (types.is_decimal(wanted) and wanted.precision - wanted.scale >= digits)
        )
    if types.is_decimal(kind) and types.is_decimal(wanted):
        return bool(
            kind.scale <= wanted.scale and kind.precision - kind.scale <= wanted.precision - wanted.scale
        )  # the digits before the point
    return bool(
        kind == wanted
        or types.is_null(kind)
        or (types.is_float32(kind) and types.is_float64(wanted))
        or (types.is_date32(kind) and types.is_timestamp(wanted) and wanted.tz is None)
        or (types.is_timestamp(kind) and types.is_timestamp(wanted))  # INT96 has nanoseconds and no zone
    )


def _is_list(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


@dataclass(frozen=True, slots=True)
class Deleted:
    """The rows of a row group that the table has deleted but its file still holds.

    Attributes:
        rows: Number of rows in the row group, including deleted ones.
        marks: A bit for each row, which is set if the row is deleted; compressed, because most bits are equal.
    """

    rows: int
    marks: bytes

    @classmethod
    def of(cls, positions: np.ndarray, rows: int) -> Deleted:
        """Mark the rows at ``positions`` as deleted: integers of shape (deleted rows,), from 0 to rows - 1."""
        marks = np.zeros(rows, np.bool_)
        marks[positions] = True
        return cls(rows, zlib.compress(np.packbits(marks).tobytes(), 1))

    def kept(self) -> pa.Array:
        """Return whether each row is kept, as booleans of shape (rows,)."""
        bits = np.frombuffer(zlib.decompress(self.marks), np.uint8)
        return pa.array(~np.unpackbits(bits, count=self.rows).view(np.bool_))
