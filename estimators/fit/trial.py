"""Tries one batch with the model on the driver, before any rank starts, to find errors within seconds."""

from __future__ import annotations

import copy
import logging
import math
import uuid
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from spark_hvd.data.readers.dataset import Column, DatasetMeta, RowGroup, listed
from spark_hvd.data.readers.errors import DataError
from spark_hvd.data.readers.files import where
from spark_hvd.data.readers.reader import Batch
from spark_hvd.estimators.errors import ModelError
from spark_hvd.estimators.fit.plan import FitPlan, Settings
from spark_hvd.estimators.training.head import INTEGER_LABELS, KNOWN, known_as
from spark_hvd.estimators.training.inputs import TensorSpec
from spark_hvd.estimators.training.rows import open_reader, reader_spec
from spark_hvd.estimators.training.spec import Objects, TrainSpec, losses_of
from spark_hvd.store import Store

_log = logging.getLogger(__name__)
ROWS = 32
"""Maximum number of rows to try: enough for batch normalisation, and few enough to take no time."""


@contextmanager
def batch_norm_layers(model: torch.nn.Module) -> Iterator[list[str]]:
    """Within this context, collect names of batch normalisation layers that would fail on a batch of one row.

    The model, or a copy, must train on a batch of any size meanwhile: torch refuses one value per channel.
    """
    found: list[str] = []

    def watch(name: str, layer: torch.nn.Module) -> torch.utils.hooks.RemovableHandle:
        def note(its: torch.nn.Module, given: tuple[Any, ...]) -> None:
            if its.training and given and math.prod(given[0].shape[2:]) == 1 and name not in found:
                found.append(name)

        return layer.register_forward_pre_hook(note)

    kinds = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)
    handles = [watch(name, layer) for name, layer in model.named_modules() if isinstance(layer, kinds)]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def batch_of_rows(plan: FitPlan, table: pa.Table, columns: Sequence[Column]) -> Batch:
    """Return the rows of a table as ranks would get them, through the same reader.

    Raises:
        DataError: There are no rows, nulls among them, or the functions fail.
    """
    if not table.num_rows:
        raise DataError("the DataFrame has no rows: expected at least one. Check filters and joins that lead to it")
    store = Store.create(f"memory://spark_hvd-trial/{uuid.uuid4().hex}")
    try:
        path = store.join("rows.parquet")
        with store.writing(path) as file:
            pq.write_table(table, file)
        group = RowGroup(path, 0, table.num_rows)
        try:
            return first_batch(plan, DatasetMeta(store.url, tuple(columns), (group,)), store)
        except DataError as error:  # of a file that the user does not know
            raise DataError(str(error).replace(where(group), "the first rows")) from error
    finally:
        store.delete(store.url)


def first_batch(plan: FitPlan, dataset: DatasetMeta, store: Store, kind: str | None = None) -> Batch:
    """Return the first batch of a data set in ``store``, by the reader called ``kind``."""
    spec = reader_spec(plan.spec, plan.objects, dataset=dataset, store=store, workers=1, kind=kind)
    rows = min(ROWS, dataset.rows)
    with closing(open_reader(spec)) as reader:
        return next(reader.batches(0, [(0, rows)], [rows]))


def dtypes_asked(settings: Settings) -> Iterator[tuple[str, str | None]]:
    """Yield columns and the dtypes requested for them as inputs and labels; None where none is given."""
    for columns, dtypes in (("feature_cols", "input_dtypes"), ("label_cols", "label_dtypes")):
        yield from zip(settings[columns], settings[dtypes] or [None] * len(settings[columns]), strict=True)


def spec_for(plan: FitPlan, batch: Batch, columns: Sequence[Column], others: bool = False) -> TrainSpec:
    """Return the specification of a plan with its inputs and labels, whose dtypes and shapes come from a batch.

    If ``others``, the batch may have other columns than requested, and all of them are inputs.

    Raises:
        DataError: A feature or label is not in the batch.
    """
    settings, known = plan.settings, {column.name: column for column in columns}

    def own(name: str) -> str | None:
        # The scale of a decimal serves another use of the column.
        return "float32" if name in known and known[name].dtype == "float64" else None

    def tensors(names: Sequence[str], what: str) -> tuple[TensorSpec, ...]:
        shapes = settings[f"{what}_shapes"] or [None] * len(names)
        dtypes = settings[f"{what}_dtypes"] or [None] * len(names)
        stacks = what == "input" and settings["stack_features"]
        return tuple(
            # The batch shows what a decoder or transformation_fn returns for a column.
            TensorSpec(
                _as_in(batch[name], known.get(name) or Column(name, "object")), dtype or own(name), shape, stacks
            )
            for name, shape, dtype in zip(names, shapes, dtypes, strict=True)
        )

    if settings.get("collate") is None and not others:
        _check_there(settings, batch)
    labels = tensors(there := [name for name in settings["label_cols"] if name in batch], "label")
    if settings["label_dtypes"] is None:
        losses = losses_known(plan.objects)
        labels = tuple(
            replace(label, dtype=_label_dtype(batch[label.column.name], losses, number))
            for number, label in enumerate(labels)
        )
    if settings.get("collate") is None and all(name in batch for name in settings["feature_cols"]):
        return replace(plan.spec, inputs=tensors(settings["feature_cols"], "input"), labels=labels)
    no_inputs = {*there, settings["sample_weight_col"]}
    inputs = tuple(TensorSpec(_as_in(batch[name], Column(name, "object"))) for name in batch if name not in no_inputs)
    return replace(plan.spec, inputs=inputs, labels=labels)


def _check_there(settings: Settings, batch: Batch) -> None:
    for parameter in ("feature_cols", "label_cols"):
        for name in settings[parameter]:
            if name not in batch:
                raise DataError(
                    f"{parameter}={settings[parameter]!r}: {name!r} is not in the batch, which has {listed(batch)}. "
                    f"transformation_removed_fields={settings['transformation_removed_fields']!r} lists what "
                    f"transformation_fn removes: remove {name!r} there and return it, or remove it from {parameter}"
                )


def _label_dtype(tensor: torch.Tensor, losses: Sequence[Any], number: int) -> str | None:
    """Return a label's default dtype: int64 for losses of class numbers, otherwise float32 for numbers."""
    loss = losses[number if len(losses) > 1 else 0] if losses else None
    if known_as(loss) in INTEGER_LABELS:
        return "int64" if tensor.dim() == 1 or not tensor.is_floating_point() else None
    known = isinstance(loss, torch.nn.Module) or known_as(loss) in KNOWN
    return "float32" if known or tensor.dtype is torch.float64 else None


def losses_known(objects: Objects) -> list[Any]:
    """Return the losses; none if their constructors work only in ranks."""
    try:
        return losses_of(replace(objects, model=copy.deepcopy(objects.model)) if objects.loss_constructors else objects)
    except Exception as error:  # any error of the user's functions; a rank reports it if it occurs there, too
        _log.warning("loss_constructors cannot be tried on the driver: %s: %s", type(error).__name__, error)
        return []


def check_loss(spec: TrainSpec, loss: float, batch: Batch) -> None:
    """Check that the loss of the tried batch is not NaN or infinite because of such values in the batch.

    Raises:
        DataError: It is, and training would end there.
    """
    if spec.terminate_on_nan and not math.isfinite(loss) and (found := spec.not_finite(batch)):
        raise DataError(f"the loss is {loss} for the first rows, tried before ranks were started: {found}")


def _as_in(tensor: torch.Tensor, column: Column) -> Column:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Column(column.name, dtype, tuple(tensor.shape[1:]), column.spark_type, column.encoding)


def failed(what: str, error: Exception, given: Sequence[str]) -> ModelError:
    """Return the error of a failed step of a trial: what was ``given``, and which parameters may help."""
    text, advice = str(error), ""
    if "multi-target" in text:
        advice = " label_shapes=[[-1]] makes one class number of each row."
    elif "dtype" in text or "scalar type" in text:
        wanted = "int64" if "Long" in text.partition("but")[0] else "float32"
        advice = f" input_dtypes= and label_dtypes= change dtypes, for example input_dtypes=[{wanted!r}]."
    elif "shape" in text or "size" in text:
        advice = " input_shapes= and label_shapes= change shapes, for example input_shapes=[[-1, 1, 28, 28]]."
    return ModelError(
        f"{what} failed on a batch of these data, tried before ranks were started: {type(error).__name__}: {text}\n"
        f"Given: {'; '.join(given)}.{advice}"
    )


def describe(value: Any) -> str:
    """Describe a tensor by dtype and shape, and anything else by its type."""
    if not hasattr(value, "shape"):
        return type(value).__name__
    if not isinstance(value, torch.Tensor):
        return f"text {list(value.shape)}"
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
