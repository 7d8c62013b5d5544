"""Writes Delta tables with logs made by hand from Delta's protocol, because deltalake writes few of its features."""

from __future__ import annotations

import json
import struct
import uuid
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from zmq.utils import z85


def column(name: str, kind: Any, number: int | None = None, physical: str = "", **more: Any) -> dict[str, Any]:
    """Return a field of a Delta schema. With a number, it has the metadata of column mapping."""
    mapped = {"delta.columnMapping.id": number, "delta.columnMapping.physicalName": physical} if number else {}
    return {"name": name, "type": kind, "nullable": True, "metadata": mapped, **more}


def added(folder: Path, name: str, table: pa.Table, path: str | None = None, **more: Any) -> dict[str, Any]:
    """Write a file with two rows per row group, and return the action that adds it to a table."""
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, file, row_group_size=2)
    told = {"size": file.stat().st_size, "modificationTime": 0, "dataChange": True, "partitionValues": {}}
    stats = json.dumps({"numRecords": table.num_rows})
    return {"add": {"path": path or name, "stats": stats, **told, **more}}


def head(
    columns: Sequence[dict[str, Any]], features: Sequence[str] = (), writes: Sequence[str] = (), **more: Any
) -> list[dict[str, Any]]:
    """Return the first actions of a Delta table with these columns. ``more`` are fields of its metadata."""
    versions = {"minReaderVersion": 3, "minWriterVersion": 7}
    lists = {"readerFeatures": list(features), "writerFeatures": [*features, *writes]}
    schema = json.dumps({"type": "struct", "fields": list(columns)})
    told = {"id": "00000000-0000-0000-0000-000000000000", "format": {"provider": "parquet", "options": {}}}
    metadata = {**told, "schemaString": schema, "partitionColumns": [], "configuration": {}, "createdTime": 0, **more}
    return [{"protocol": {**versions, **lists}}, {"metaData": metadata}]


def logged(folder: Path, actions: Sequence[dict[str, Any]], version: int = 0) -> Path:
    log = folder / "_delta_log"
    log.mkdir(parents=True, exist_ok=True)
    (log / f"{version:020}.json").write_text("".join(f"{json.dumps(action)}\n" for action in actions))
    return folder


def vector(*rows: int) -> dict[str, Any]:
    """Return a deletion vector that is stored in the log."""
    bitmap = _bitmap(rows)
    bitmap += bytes(-len(bitmap) % 4)
    return {
        "storageType": "i",
        "pathOrInlineDv": z85.encode(bitmap).decode(),
        "sizeInBytes": len(bitmap),
        "cardinality": len(rows),
    }


def vector_beside(folder: Path, *rows: int) -> dict[str, Any]:
    """Return a deletion vector that is stored in a file of the table, as Databricks and Spark store it."""
    bitmap, name = _bitmap(rows), uuid.uuid4()
    ends = struct.pack(">I", len(bitmap)), struct.pack(">I", zlib.crc32(bitmap))
    (folder / f"deletion_vector_{name}.bin").write_bytes(b"\x01" + ends[0] + bitmap + ends[1])
    found = {"storageType": "u", "pathOrInlineDv": z85.encode(name.bytes).decode(), "offset": 1}
    return {**found, "sizeInBytes": len(bitmap), "cardinality": len(rows)}


def _bitmap(rows: Sequence[int]) -> bytes:
    """Return a roaring bitmap of a few rows."""
    head = struct.pack("<IQIIIHHI", 1681511377, 1, 0, 12346, 1, 0, len(rows) - 1, 16)
    return head + np.array(rows, "<u2").tobytes()
