"""Which reader opens a data set: the one place that knows them all."""

from __future__ import annotations

from typing import Any

from spark_hvd.data.readers.arrow import ArrowReader
from spark_hvd.data.readers.blocks import TensorForm
from spark_hvd.data.readers.reader import Batch, Reader, ReaderSpec
from spark_hvd.estimators.training.spec import Objects, TrainSpec


def reader_spec(spec: TrainSpec, objects: Objects, **fields: Any) -> ReaderSpec:
    """What a reader is asked for in a training, with ``fields`` in place of what is asked for in all of it."""
    return ReaderSpec(**{"columns": spec.columns, "store": spec.store, **spec.reader, **objects.reader, **fields})


def open_reader(spec: ReaderSpec) -> Reader[Batch]:
    """Open the reader of ``spec.kind``.

    Raises:
        DataError: a column is missing, or the Arrow reader is asked for a data set with a Unischema.
    """
    for name in spec.columns:
        if name not in {field[0] for field in spec.edit_fields}:
            spec.dataset.column(name)
    if spec.kind == "petastorm" or (spec.kind is None and spec.dataset.unischema):
        from spark_hvd.estimators.petastorm.reader import PetastormReader

        return PetastormReader(spec)
    return ArrowReader(spec, TensorForm(spec))
