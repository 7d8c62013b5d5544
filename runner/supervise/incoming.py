"""Writes a task's input rows to the local disk, in a thread, while the task's ranks start."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from spark_hvd.data.bucketing import BUCKET, ID, SOURCE, struct_of
from spark_hvd.data.spool import SpoolWriter
from spark_hvd.scratch import Scratch, local_directory


class Incoming:
    """The input rows of a task. Close it, because its thread reads memory of Spark's.

    Args:
        batches: Columns :data:`BUCKET`, :data:`ID`, :data:`SOURCE`; then the column :func:`struct_of` of each data set,
            or the columns of a single one. The user's columns have numbers for names; "c0" is the first.
        schemas: For each data set, by name, the number of its struct column and its schema, which is needed if it has
            no rows here.

    Attributes:
        folders: The folder of each data set, by name.
    """

    def __init__(self, batches: Iterator[Any], schemas: Mapping[str, tuple[int, bytes]]) -> None:
        self._scratch = Scratch("rows", local_directory(os.environ))
        self.folders = {name: os.path.join(self._scratch.path, str(at)) for at, name in enumerate(schemas)}
        known = [pa.ipc.read_schema(pa.py_buffer(schema)) for _, schema in schemas.values()]
        self._writers = [SpoolWriter(folder, each) for folder, each in zip(self.folders.values(), known, strict=True)]
        self._names = [each.names for each in known]
        self._structs = [struct_of(number) for number, _ in schemas.values()]
        self._batches = batches
        self._ends = False
        self._thread = threading.Thread(target=self._run, name="spark_hvd-rows", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Delete the rows; those that have not arrived yet are not read."""
        self._ends = True
        self._thread.join()
        self._scratch.close()

    def _run(self) -> None:
        try:
            for batch in self._batches:
                if self._ends:
                    return
                self._write(batch)
            for writer in self._writers:
                writer.close()
        except BaseException as error:
            for writer in self._writers:
                with contextlib.suppress(OSError):
                    writer.fail(error)

    def _write(self, batch: pa.RecordBatch) -> None:
        for number, writer in enumerate(self._writers):
            rows = batch if len(self._writers) == 1 else batch.filter(pc.equal(batch.column(SOURCE), number))
            if self._structs[number] in rows.schema.names:
                struct = rows.column(self._structs[number])
                values, fields = struct.flatten(), list(struct.type)
            else:
                given = [rows.schema.get_field_index(f"c{at}") for at in range(len(self._names[number]))]
                values, fields = [rows.column(at) for at in given], [rows.schema.field(at) for at in given]
            named = [field.with_name(name) for field, name in zip(fields, self._names[number], strict=True)]
            schema = pa.schema([pa.field(BUCKET, pa.int32()), pa.field(ID, pa.int64()), *named])
            writer.write(pa.RecordBatch.from_arrays([rows.column(BUCKET), rows.column(ID), *values], schema=schema))
