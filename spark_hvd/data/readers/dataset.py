"""The description of a materialised data set that ranks get: its columns, files and row groups."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from spark_hvd.data.readers.errors import DataError
from spark_hvd.data.readers.sharding import Sharding, lanes_of

if TYPE_CHECKING:
    import pyarrow as pa

    from spark_hvd.data.schemas.table import Deleted, TableSchema


SMALL_BYTES = 64 << 20
"""Maximum bytes of a data set that each of up to four ranks reads completely if rows are not shuffled."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the Parquet files, and the tensor that its values become.

    Attributes:
        name: Name in the DataFrame and in the files. Dots are part of the name.
        dtype: Name of the torch dtype that the reader yields ("float32", "int64", "bool", ...), or "object" for values
            that only a decoder or ``transformation_fn`` turns into tensors (binary).
        shape: Shape of a row's value: ``()`` for a scalar, ``(20,)`` for a vector. None if it is unknown (binary before
            decoding; lists in Parquet files of others).
        spark_type: Type in the DataFrame as Spark's ``simpleString`` ("double", "vector", "array<float>"), which
            determines the type of predictions; "" if the column does not come from a DataFrame.
        encoding: "plain", or "sparse" for a struct<size: int32, indices: list<int32>, values: list<float>> per row.
        lowest: The lowest number of a label column; None if it is unknown.
    """

    name: str
    dtype: str
    shape: tuple[int, ...] | None = ()
    spark_type: str = ""
    encoding: str = "plain"
    lowest: float | None = None

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Column:
        """Undo ``dataclasses.asdict`` after JSON has turned tuples into lists."""
        return cls(**{**data, "shape": None if data["shape"] is None else tuple(data["shape"])})


@dataclass(frozen=True, slots=True)
class RowGroup:
    """A row group of a Parquet file: the unit of reading, and of shuffling across a data set."""

    file: str
    """The complete URL or path."""
    index: int
    """The number of the row group in its file."""
    rows: int


@dataclass(frozen=True, slots=True)
class DatasetMeta:
    """A data set of Parquet files. It can be pickled; one that materialize wrote can also be converted to JSON.

    Attributes:
        url: The directory of the files, which messages name.
        columns: The columns in the order of the files, followed by those of ``partitions``.
        row_groups: All row groups, in the order of file names and row group numbers. None of them is empty.
        bytes: Compressed size of the files; 0 if it is unknown.
        unischema: Whether the data set has a Petastorm Unischema, so that only Petastorm can decode it.
        version: The table and its version, for messages; "" if the files do not belong to a table.
        partitions: Columns that no file holds, with one value per file: a row for each of :attr:`files`.
        table: The columns of a table, and how to find them in its files; None if all files have the same columns.
        deleted: (file, number of the row group) -> deleted rows, which ``row_groups`` does not count.
    """

    url: str
    columns: tuple[Column, ...]
    row_groups: tuple[RowGroup, ...]
    bytes: int = 0
    unischema: bool = False
    version: str = ""
    partitions: pa.Table | None = field(default=None, hash=False)
    table: TableSchema | None = field(default=None, hash=False)
    deleted: Mapping[tuple[str, int], Deleted] = field(default_factory=dict, hash=False)

    @property
    def files(self) -> tuple[str, ...]:
        """Paths of the files, in the order of the row groups."""
        return tuple(dict.fromkeys(group.file for group in self.row_groups))

    @property
    def rows(self) -> int:
        """Number of rows."""
        return sum(group.rows for group in self.row_groups)

    @property
    def layout(self) -> int:
        """A checksum of the row groups. If it differs, the order of rows differs for the same seed and epoch."""
        return zlib.crc32(repr([group.rows for group in self.row_groups]).encode())

    def sharding(self, batch_size: int, drop_last: bool = False, *, shuffle: bool) -> Sharding:
        """Return how ranks share the rows of an epoch."""
        return Sharding(self.rows, batch_size, drop_last, self.lanes(shuffle))

    def lanes(self, shuffle: bool) -> int:
        """Return the number of lanes from which a global batch takes rows; 1 if all ranks read all files in order."""
        if not shuffle and self.bytes <= SMALL_BYTES:
            return int(self.bytes > 0)
        return lanes_of([group.rows for group in self.row_groups])

    def column(self, name: str) -> Column:
        """Return the column called ``name``.

        Raises:
            DataError: There is no such column. The message lists the existing ones.
        """
        for column in self.columns:
            if column.name == name:
                return column
        raise DataError(f"column {name!r} is not in {self.url}, which has {listed(c.name for c in self.columns)}")

    def to_json(self) -> dict[str, Any]:
        """Return JSON-ready dicts and lists. The version, the partitions and the table are left out."""
        files = list(self.files)
        number = {file: i for i, file in enumerate(files)}
        return {
            "url": self.url,
            "columns": [asdict(column) for column in self.columns],
            "files": files,
            "row_groups": [[number[group.file], group.index, group.rows] for group in self.row_groups],
            "bytes": self.bytes,
            "unischema": self.unischema,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> DatasetMeta:
        """Undo :meth:`to_json`."""
        columns = tuple(map(Column.from_json, data["columns"]))
        groups = tuple(RowGroup(data["files"][file], index, rows) for file, index, rows in data["row_groups"])
        return cls(data["url"], columns, groups, data["bytes"], data["unischema"])


def listed(names: Iterable[str]) -> str:
    """Return names for an error message: quoted, and at most ten of them."""
    quoted = [repr(name) for name in names]
    more = f" and {len(quoted) - 10} more" if len(quoted) > 10 else ""
    return (", ".join(quoted[:10]) or "no columns") + more
