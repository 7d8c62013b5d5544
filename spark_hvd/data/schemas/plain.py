"""One type for all ways in which programs lay out text, bytes and lists: that of rows as they are given."""

from __future__ import annotations

import pyarrow as pa


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """A file's schema as rows of it are given: one type for all ways in which programs lay out text, bytes and lists.

    Files of one table have different ones, and Arrow's functions do not take them all.
    """
    return pa.schema([field.with_type(plain_type(field.type)) for field in schema])


def plain_type(kind: pa.DataType) -> pa.DataType:
    """A column's type as :func:`plain_schema` has it."""
    types = pa.types
    if types.is_dictionary(kind):
        return plain_type(kind.value_type)
    if types.is_string_view(kind) or types.is_large_string(kind):
        return pa.string()
    if types.is_binary_view(kind) or types.is_large_binary(kind):
        return pa.binary()
    if types.is_list(kind) or types.is_large_list(kind):
        return pa.list_(_plain_field(kind.value_field))
    if types.is_fixed_size_list(kind):
        return pa.list_(_plain_field(kind.value_field), kind.list_size)
    if types.is_map(kind):
        return pa.map_(_plain_field(kind.key_field), _plain_field(kind.item_field))
    return pa.struct(list(map(_plain_field, kind))) if types.is_struct(kind) else kind


def _plain_field(field: pa.Field) -> pa.Field:
    return field.with_type(plain_type(field.type))
