"""What is known of a materialised data set: columns, files, row groups. All that a rank is told of its data."""

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
"""Files that up to four ranks read whole, each of them, where rows come in their order."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column as it lies in the Parquet files, and the tensor that a row of it becomes.

    Attributes:
        name: Its name in the DataFrame and in the files. Names with dots are taken as they are.
        dtype: Name of the torch dtype that the reader yields ("float32", "int64", "bool", ...), or "object" for what
            only a decoder or ``transformation_fn`` turns into tensors (binary).
        shape: Shape of one row's value: ``()`` for a scalar, ``(20,)`` for a vector. None where it is not known
            (binary before decoding; lists in Parquet that we did not write).
        spark_type: The column's type in the DataFrame as Spark's ``simpleString`` ("double", "vector",
            "array<float>"), from which the type of predictions for it follows; "" if it never was in a DataFrame.
        encoding: "plain", or "sparse" for a struct<size: int32, indices: list<int32>, values: list<float>> a row.
        lowest: The lowest number of a label; None where that is not known.
    """

    name: str
    dtype: str
    shape: tuple[int, ...] | None = ()
    spark_type: str = ""
    encoding: str = "plain"
    lowest: float | None = None

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Column:
        """Undo ``dataclasses.asdict``, after a trip through JSON."""
        return cls(**{**data, "shape": None if data["shape"] is None else tuple(data["shape"])})


@dataclass(frozen=True, slots=True)
class RowGroup:
    """One row group of one Parquet file; the unit of reading and of shuffling across a data set."""

    file: str
    """URL or path, complete."""
    index: int
    """Its number in the file."""
    rows: int


@dataclass(frozen=True, slots=True)
class DatasetMeta:
    """A data set that lies in Parquet. Plain data: pickles; one that we wrote turns into JSON and back.

    Attributes:
        url: The directory of the files; names the data set in messages.
        columns: In the order of the files, those of ``partitions`` behind them.
        row_groups: All of them, in the order of file names and row group numbers. None is empty.
        bytes: Compressed size of the files; 0 where it is not known.
        unischema: Whether the data set carries a Petastorm Unischema, so that only Petastorm can decode it.
        version: Which version of which table it is, for messages; "" for files that are no table's.
        partitions: Columns that are in no file, each with one value for a file: a row for each of :attr:`files`.
        table: The columns of a table, and how its files have them; None for files that all have the same.
        deleted: By file and number the row groups with rows that are deleted, and not counted in ``row_groups``.
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
        """A number that differs where the order of rows does, for the same seed and epoch."""
        return zlib.crc32(repr([group.rows for group in self.row_groups]).encode())

    def sharding(self, batch_size: int, drop_last: bool = False, *, shuffle: bool) -> Sharding:
        """Return how ranks share the rows of an epoch: by the same global batches."""
        return Sharding(self.rows, batch_size, drop_last, self.lanes(shuffle))

    def lanes(self, shuffle: bool) -> int:
        """Return the number of lanes from which a global batch takes rows; 1 if all ranks read all files in order."""
        if not shuffle and self.bytes <= SMALL_BYTES:
            return int(self.bytes > 0)
        return lanes_of([group.rows for group in self.row_groups])

    def column(self, name: str) -> Column:
        """Return the column called ``name``.

        Raises:
            DataError: There is none; the text lists those there are.
        """
        for column in self.columns:
            if column.name == name:
                return column
        raise DataError(f"column {name!r} is not in {self.url}, which has {listed(c.name for c in self.columns)}")

    def to_json(self) -> dict[str, Any]:
        """Return JSON-ready dicts and lists, with each file name once, but without versions and partitions."""
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
    """Return names for an error message: quoted, and the first ten only if there are more."""
    quoted = [repr(name) for name in names]
    more = f" and {len(quoted) - 10} more" if len(quoted) > 10 else ""
    return (", ".join(quoted[:10]) or "no columns") + more
