"""Rows of a file that its table has marked as deleted, as Delta's deletion vectors and Iceberg's delete files do."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
import pyarrow as pa


@dataclass(frozen=True, slots=True)
class Deleted:
    """Which rows of a row group are deleted, and still in its file.

    Attributes:
        rows: Of the row group, those that are deleted among them.
        marks: A bit for each row, set where it is deleted; compressed, as most are alike.
    """

    rows: int
    marks: bytes

    @classmethod
    def of(cls, positions: np.ndarray, rows: int) -> Deleted:
        """The rows at some positions.

        Args:
            positions: Of shape (deleted rows,), integers from 0 to rows - 1.
            rows: Of the row group.
        """
        marks = np.zeros(rows, np.bool_)
        marks[positions] = True
        return cls(rows, zlib.compress(np.packbits(marks).tobytes(), 1))

    def kept(self) -> pa.Array:
        """Whether each row is still there: booleans, of shape (rows,)."""
        bits = np.frombuffer(zlib.decompress(self.marks), np.uint8)
        return pa.array(~np.unpackbits(bits, count=self.rows).view(np.bool_))
