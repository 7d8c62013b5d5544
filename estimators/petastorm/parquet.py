"""The parts of pyarrow's removed ``ParquetDataset`` that Petastorm 0.12 needs, on today's ParquetFile and fsspec.

Listing and footers are read on first use, so a process that gets its row groups from another needs neither.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any
from urllib.parse import unquote

import fsspec
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq

PartitionKeys = list[tuple[str, int]]
"""(name, index of the value in that level's keys), one per level."""


class PartitionLevel:
    """One ``name=value`` level of directories, and the values found for it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.keys: list[str] = []

    def index_of(self, key: str) -> int:
        """Return the index of ``key``, which is added if new."""
        if key not in self.keys:
            self.keys.append(key)
        return self.keys.index(key)

    @property
    def dictionary(self) -> pa.Array:
        """The values: integers if all of them are, otherwise strings."""
        try:
            return pa.array([int(key) for key in self.keys], pa.int64())
        except ValueError:
            return pa.array(self.keys, pa.string())


class Partitions(list[PartitionLevel]):
    """The levels of directories of a data set; false if there are none."""

    @property
    def partition_names(self) -> set[str]:
        """Names of the levels."""
        return {level.name for level in self}

    def keys_of(self, directories: Iterable[str]) -> PartitionKeys:
        """Parse the directories between the data set and a file; new values are added."""
        parts = [part.split("=", 1) for part in directories if "=" in part]
        for name, _ in parts[len(self) :]:
            self.append(PartitionLevel(name))
        return [(name, level.index_of(unquote(value))) for (name, value), level in zip(parts, self, strict=True)]


class ParquetDatasetPiece:
    """A file of a data set, or one row group of it. Pickles, so that workers in other processes can use it."""

    def __init__(
        self,
        path: str,
        open_file_func: Callable[[str], Any],
        row_group: int | None = None,
        partition_keys: PartitionKeys | None = None,
    ) -> None:
        self.path = path
        self.open_file_func = open_file_func
        self.row_group = row_group
        self.partition_keys = partition_keys or []

    def get_metadata(self) -> pq.FileMetaData:
        """Return the footer of the file."""
        with self.open_file_func(self.path) as file:
            return pq.read_metadata(file)

    def read(self, columns: Iterable[str] | None = None, partitions: Partitions | None = None) -> pa.Table:
        """Return the rows, with columns in file order, and a dictionary column for each level of ``partitions``."""
        with self.open_file_func(self.path) as source, pq.ParquetFile(source) as file:
            names = None
            if columns is not None:
                wanted = set(columns)
                names = [name for name in file.schema_arrow.names if name in wanted]
            if self.row_group is None:
                table = file.read(columns=names)
            else:
                table = file.read_row_group(self.row_group, columns=names)
        for level, (name, index) in zip(partitions or (), self.partition_keys, strict=False):
            indices = pa.array([index] * table.num_rows, pa.int32())
            table = table.append_column(name, pa.DictionaryArray.from_arrays(indices, level.dictionary))
        return table


class ParquetDataset:
    """A directory of Parquet files, possibly with ``name=value`` directories, or a list of files.

    ``filters`` see only partition columns; ``validate_schema`` and ``metadata_nthreads`` have no effect.
    """

    def __init__(
        self,
        path_or_paths: str | Sequence[str],
        filesystem: Any = None,
        filters: Any = None,
        validate_schema: bool = False,
        metadata_nthreads: int = 1,
    ) -> None:
        self.fs = as_fsspec(filesystem)
        strip = getattr(self.fs, "_strip_protocol", str)
        if not isinstance(path_or_paths, str) and len(path_or_paths) == 1:
            path_or_paths = path_or_paths[0]
        self.paths = strip(path_or_paths) if isinstance(path_or_paths, str) else [strip(path) for path in path_or_paths]
        self._filters = filters

    @property
    def metadata_path(self) -> str:
        """Path of the summary of all row groups, which need not exist."""
        return f"{self._root}/_metadata"

    @cached_property
    def metadata(self) -> pq.FileMetaData | None:
        """The summary of all row groups, if there is one."""
        return self._summary("_metadata")

    @cached_property
    def common_metadata(self) -> pq.FileMetaData | None:
        """The schema and Petastorm's own entries, if there are any."""
        return self._summary("_common_metadata")

    @property
    def pieces(self) -> list[ParquetDatasetPiece]:
        """The files, in the order of their paths."""
        return self._manifest[0]

    @property
    def partitions(self) -> Partitions | None:
        """The levels of directories; None if files were given by name."""
        return self._manifest[1]

    @property
    def _root(self) -> str | None:
        return self.paths.rstrip("/") if isinstance(self.paths, str) else None

    def _summary(self, name: str) -> pq.FileMetaData | None:
        path = f"{self._root}/{name}"
        if self._root is None or not self.fs.exists(path):
            if self._root is not None and not self.fs.exists(self.paths):
                raise FileNotFoundError(f"{self.paths} does not exist")
            return None
        with self.fs.open(path) as file:
            return pq.read_metadata(file)

    @cached_property
    def _manifest(self) -> tuple[list[ParquetDatasetPiece], Partitions | None]:
        if self._root is None or not self.fs.isdir(self.paths):
            files = [self.paths] if isinstance(self.paths, str) else self.paths
            for path in files:
                if not self.fs.exists(path):
                    raise FileNotFoundError(f"{path} does not exist")
            return [ParquetDatasetPiece(path, self.fs.open) for path in files], None
        partitions, pieces = Partitions(), []
        for path in sorted(self.fs.find(self.paths)):
            *directories, name = path[len(self._root) :].lstrip("/").split("/")
            if _is_hidden(name) or any(_is_hidden(part) and "=" not in part for part in directories):
                continue
            keys = partitions.keys_of(directories)
            if _accepts(self._filters, keys, partitions):
                pieces.append(ParquetDatasetPiece(path, self.fs.open, partition_keys=keys))
        return pieces, partitions


def as_fsspec(filesystem: Any) -> Any:
    """Return ``filesystem`` with fsspec's methods: pyarrow's are wrapped, None becomes the local one."""
    if filesystem is None:
        return fsspec.filesystem("file")
    if isinstance(filesystem, pyarrow.fs.FileSystem):
        return fsspec.implementations.arrow.ArrowFSWrapper(filesystem)
    return filesystem


def _is_hidden(name: str) -> bool:
    return not name or name.startswith(("_", ".")) or name.endswith((".crc", "_$folder$"))


_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
    "<=": operator.le,
    ">=": operator.ge,
    "in": lambda a, b: a in b,
    "not in": lambda a, b: a not in b,
}


def _accepts(filters: Any, keys: PartitionKeys, partitions: Partitions) -> bool:
    if not filters:
        return True
    values = {name: level.keys[index] for (name, index), level in zip(keys, partitions, strict=False)}
    alternatives = [filters] if isinstance(filters[0][0], str) else filters
    return any(all(_holds(condition, values) for condition in conditions) for conditions in alternatives)


def _holds(condition: tuple[str, str, Any], values: dict[str, str]) -> bool:
    name, symbol, wanted = condition
    if symbol not in _OPERATORS:
        raise ValueError(f"filter {condition!r}: expected one of {', '.join(_OPERATORS)}")
    if name not in values:
        return True
    sample = next(iter(wanted)) if symbol in ("in", "not in") else wanted
    return _OPERATORS[symbol](type(sample)(values[name]), wanted)
