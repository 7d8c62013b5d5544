"""Which reader opens a data set: the one place that knows them all."""

from __future__ import annotations

from typing import Any

from spark_hvd.data.readers.arrow import ArrowReader
from spark_hvd.data.readers.blocks import TensorForm
from spark_hvd.data.readers.collated import CollatedForm
from spark_hvd.data.readers.errors import DataError
from spark_hvd.data.readers.forms import Form
from spark_hvd.data.readers.reader import Batch, Reader, ReaderSpec
from spark_hvd.estimators.training.spec import Objects, TrainSpec


def reader_spec(spec: TrainSpec, objects: Objects, **fields: Any) -> ReaderSpec:
    """What a reader is asked for in a training, with ``fields`` in place of what is asked for in all of it."""
    return ReaderSpec(**{"columns": spec.columns, "store": spec.store, **spec.reader, **objects.reader, **fields})


def open_reader(spec: ReaderSpec) -> Reader[Batch]:
    """Open the reader of ``spec.kind``.

    Raises:
        DataError: a column is missing, or Petastorm's reader is asked for one that is in no file.
    """
    for name in spec.columns:
        if name not in {field[0] for field in spec.edit_fields}:
            spec.dataset.column(name)
    if spec.kind == "petastorm" or (spec.kind is None and spec.dataset.unischema):
        partitions = spec.dataset.partitions
        if partitions is not None and (outside := [name for name in spec.columns if name in partitions.column_names]):
            raise DataError(
                f"column {outside[0]!r} is in no file of {spec.dataset.url}, but in the names of its directories or in "
                "its log, where Petastorm does not look: use reader='arrow', or leave the column out"
            )
        from spark_hvd.estimators.petastorm.reader import PetastormReader

        return PetastormReader(spec)
    return ArrowReader(spec, form_of(spec))


def form_of(spec: ReaderSpec) -> Form[Any, Batch]:
    """What rows are in until they are a batch."""
    collate = spec.collate
    return (
        TensorForm(spec) if collate is None else CollatedForm(lambda rows: collate(rows, spec.training), spec.workers)
    )
