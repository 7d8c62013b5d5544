"""Which reader opens a data set: the one place that knows them all."""

from __future__ import annotations

from spark_hvd.estimators.readers.arrow import ArrowReader
from spark_hvd.estimators.readers.reader import Reader, ReaderSpec


def open_reader(spec: ReaderSpec, kind: str | None = None) -> Reader:
    """Open the reader called ``kind``: "arrow", "petastorm", or None to choose by the data set.

    Raises:
        DataError: a column is missing, or the Arrow reader is asked for a data set with a Unischema.
    """
    for name in spec.columns:
        if name not in {field[0] for field in spec.edit_fields}:
            spec.dataset.column(name)
    if kind == "petastorm" or (kind is None and spec.dataset.unischema):
        from spark_hvd.estimators.petastorm.reader import PetastormReader

        return PetastormReader(spec)
    return ArrowReader(spec)
