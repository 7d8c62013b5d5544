"""The rows that a rank trains or validates on, from files of a data set or from its shard of a DataFrame."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

import spark_hvd.torch as hvd
from spark_hvd.data.frame import FrameSource
from spark_hvd.data.readers.arrow import ArrowReader, CollatedForm
from spark_hvd.data.readers.batches import Layout
from spark_hvd.data.readers.blocks import TensorForm
from spark_hvd.data.readers.dataset import Column
from spark_hvd.data.readers.errors import DataError
from spark_hvd.data.readers.forms import Form
from spark_hvd.data.readers.measure import ColumnFindings, Uses
from spark_hvd.data.readers.reader import Batch, Reader, ReaderSpec
from spark_hvd.data.readers.sharding import Position, Sharding
from spark_hvd.data.readers.values import Values, columns_yielded, may_have_nulls
from spark_hvd.data.registry import source_of
from spark_hvd.data.shard import source_here
from spark_hvd.data.source import ReadOptions
from spark_hvd.data.spool import Spool
from spark_hvd.estimators.training.spec import Objects, TrainSpec
from spark_hvd.world.words import count


def reader_spec(spec: TrainSpec, objects: Objects, **fields: Any) -> ReaderSpec:
    """Return the specification of a reader in a training; ``fields`` override those of the whole training."""
    whole = {"columns": spec.columns, "store": spec.store, "stack": spec.stack, **spec.reader, **objects.reader}
    return ReaderSpec(**{**whole, **fields})


def open_reader(spec: ReaderSpec) -> Reader[Batch]:
    """Open the reader of ``spec.kind``.

    Raises:
        DataError: A column is missing, or Petastorm's reader would need one that is not in any file.
    """
    for name in spec.columns:
        if name not in {field[0] for field in spec.edit_fields}:
            spec.dataset.column(name)
    if spec.kind == "petastorm" or (spec.kind is None and spec.dataset.unischema):
        partitions = spec.dataset.partitions
        if partitions is not None and (outside := [name for name in spec.columns if name in partitions.column_names]):
            raise DataError(
                f"column {outside[0]!r} is not in the files of {spec.dataset.url}, but in names of directories or "
                "in its log, where Petastorm does not look: use reader='arrow', or omit the column"
            )
        from spark_hvd.estimators.petastorm.reader import PetastormReader

        return PetastormReader(spec)
    return ArrowReader(spec, form_of(spec))


def form_of(spec: ReaderSpec) -> Form[Any, Batch]:
    """Return the form that rows have until they become a batch."""
    if (collate := spec.collate) is not None:
        return CollatedForm(lambda rows: collate(rows, spec.training), spec.workers)
    columns = columns_yielded(spec)
    if any(each.dtype == "object" and each.name in spec.text and each.name not in spec.decoders for each in columns):
        values = Values(spec, Layout(columns))
        return CollatedForm(lambda rows: values.columns_of(pa.Table.from_batches([rows]), "a batch"), spec.workers)
    return TensorForm(spec)


@dataclass(frozen=True)
class Rows:
    """Rows of an epoch.

    For the same seed and epoch, ``layout`` differs if the order differs. ``columns`` holds what is known of them.
    """

    reader: Reader[Batch]
    sharding: Sharding
    layout: int
    columns: Sequence[Column]

    @property
    def steps(self) -> int:
        """Number of batches in an epoch, the same on all ranks."""
        return len(self.sharding.batches(Position(), hvd.rank(), hvd.size()))

    def weights(self, rank: int, size: int) -> list[float]:
        """Return a row's weight in each of a rank's first batches, see :class:`~spark_hvd.data.readers.feed.Feed`."""
        mine, totals = self.sharding.batches(Position(), rank, size), self.sharding.totals(Position(), size)
        return [rows * size / every for rows, every in zip(mine, totals, strict=True)]

    def first_epoch(self, rank: int, size: int) -> Iterator[Batch]:
        """Return a rank's batches of epoch 0."""
        place = Position(), rank, size
        return self.reader.batches(0, self.sharding.share(*place), self.sharding.batches(*place))


def rows_of(
    name: str,
    spec: ReaderSpec,
    batch_size: int,
    drop_last: bool = False,
    uses: Uses | None = None,
    *,
    same_batches: bool = False,
) -> Rows:
    """Open the rows of a data set.

    For training, or with ``same_batches``, files give the same global batches on any number of ranks. Collective for a
    DataFrame in the run's ``data``, for which ``spec.dataset`` has no files.

    Raises:
        DataError: errors of the readers; for a DataFrame also nulls, lists of different lengths, unusable weights, and
            fewer rows than ranks.
    """
    if spec.dataset.row_groups:
        sharding = spec.dataset.sharding(batch_size, drop_last, shuffle=spec.shuffle)
        if not (spec.training or same_batches):  # a rank reads adjacent rows, which is faster
            sharding = replace(sharding, lanes=0)
        return Rows(open_reader(spec), sharding, spec.dataset.layout, spec.dataset.columns)
    spooled = source_of(name)
    source = source_here(name, spooled)
    assert isinstance(source, FrameSource)
    # Ranks of one task share a folder, and measure the same.
    uses = replace(uses or Uses(), nullable=may_have_nulls(spec, spec.dataset.columns))
    mine = _measured(name, source.spool, spec.dataset.columns, uses)
    by_folder = hvd.allgather_object((spooled.folder, mine), name=f"{name}.measured")
    measured = ColumnFindings.together(dict(by_folder).values())
    measured.check(uses.weights)
    if source.rows < hvd.size():
        raise DataError(too_few(source.rows, name, hvd.size()))
    spec = replace(spec, dataset=replace(spec.dataset, columns=measured.of(spec.dataset.columns)))
    options = ReadOptions(
        columns=spec.columns, shuffle=spec.shuffle, seed=spec.seed, window_rows=spec.window_rows, workers=spec.workers
    )
    sharding = source.sharding(batch_size, drop_last, options)
    return Rows(source.open(options, form_of(spec)), sharding, source.layout, spec.dataset.columns)


def validation_rows(spec: TrainSpec, objects: Objects) -> Rows:
    """Open the rows of a training's validation; see :func:`rows_of`."""
    assert spec.validation is not None
    reader = reader_spec(
        spec,
        objects,
        dataset=spec.validation,
        shuffle=False,
        seed=spec.seed,
        training=False,
        workers=spec.val_reader_num_workers,
    )
    return rows_of(
        "validation", reader, spec.val_batch_size, uses=spec.uses, same_batches=spec.validation_depends_on_batches
    )


def _measured(name: str, spool: Spool, columns: Sequence[Column], uses: Uses) -> ColumnFindings:
    measured = ColumnFindings()
    for batch in spool.batches([column.name for column in columns]):
        measured.rows += batch.num_rows
        for number, column in enumerate(columns):
            measured.add(column, batch.column(number), uses)
            if column.name == uses.weights and not batch.column(number).null_count:
                measured.weigh(name, batch.column(number))
    return measured


def too_few(rows: int, what: str, num_proc: int) -> str:
    """Return the text of the error that a data set has fewer rows than ranks."""
    if not rows:
        return (
            f"there are no rows for {what}: expected at least one for each rank. Check filters and joins that lead to "
            "the DataFrame, and what validation= leaves of it"
        )
    return (
        f"{count(rows, 'row')} for {what} and num_proc={num_proc}: expected at least one row for each rank. "
        "Use fewer ranks or more rows"
    )


def check_batches(layer: str, spec: TrainSpec, sharding: Sharding) -> None:
    """Check that no rank trains on a batch of one row; the result is the same on all ranks.

    Raises:
        DataError: A rank would.
    """
    size = hvd.size()
    alone = [rank for rank in range(size) if 1 in sharding.batches(Position(), rank, size)]
    if alone:
        next_step = "batch_size" if spec.batch_size == 1 else "drop_last=True, or another batch_size"
        raise DataError(
            f"rank {alone[0]} of {size} would train on a batch of one row, for which {layer!r}, a layer of batch "
            f"normalisation, has no variance: {sharding.rows} rows, batch_size={spec.batch_size}. Expected two rows in "
            f"each batch of a rank. Next: {'a larger ' if spec.batch_size == 1 else ''}{next_step} or num_proc"
        )
