"""The classes of a label column: found by Spark before a fit, then numbers for the loss, and values in predictions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import torch
from pyspark.sql import functions as F  # noqa: N812 - the name that everybody gives it
from pyspark.sql import types as T  # noqa: N812 - likewise
from torch import nn

from spark_hvd.data.readers.dataset import listed
from spark_hvd.data.readers.errors import DataError
from spark_hvd.estimators.data.columns import quoted
from spark_hvd.runner.spark.names import job_named

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

MOST_CLASSES = 10_000
_INTEGERS = {"tinyint", "smallint", "int", "bigint", "boolean"}


@dataclass(frozen=True)
class Labels:
    """What a label column holds.

    Attributes:
        column: Its name.
        spark_type: Its type, as Spark's ``simpleString``.
        size: Number of classes.
        classes: Their values, sorted, in the order of the model's scores; none where a row's label is an array with 0
            or 1 for each class (multi-label).
    """

    column: str
    spark_type: str
    size: int
    classes: tuple[Any, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As JSON-ready values."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Labels:
        """The inverse of :meth:`to_json`."""
        return cls(**{**data, "classes": tuple(data["classes"])})

    @property
    def loss(self) -> nn.Module:
        """The loss of scores (rows, size) and :meth:`tensor`."""
        return nn.CrossEntropyLoss() if self.classes else nn.BCEWithLogitsLoss()

    @property
    def accuracy(self) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        """The share of scores (rows, size) that are right, a metric."""
        return _of_classes if self.classes else _of_each

    def tensor(self, values: pa.Array) -> torch.Tensor:
        """Numbers of the classes (rows,) int64; of arrays their values (rows, size) float32.

        Raises:
            DataError: a value is none of the classes.
        """
        if not self.classes:
            numbers = values.flatten().cast(pa.float32()).to_numpy()
            return torch.tensor(numbers).reshape(len(values), -1)
        found = pc.index_in(values, value_set=pa.array(self.classes).cast(values.type))
        if found.null_count:
            strange = values.filter(found.is_null()).unique().to_pylist()
            raise DataError(
                f"column {self.column!r} has values that it had not when fit looked for classes: {listed(strange)}. "
                "Expected the same rows each time they are computed: df.cache(), or no rand() without a seed"
            )
        return torch.tensor(found.to_numpy()).long()

    @property
    def prediction_type(self) -> str:
        """The type of predicted labels: text, boolean and arrays as in the data, numbers as double for evaluators."""
        same = self.spark_type in ("string", "boolean") or not self.classes
        return self.spark_type if same else "double"

    def predicted(self, scores: torch.Tensor, threshold: float) -> tuple[Any, torch.Tensor]:
        """Predicted labels, and probabilities (rows, size); ``scores`` are (rows, size).

        Args:
            scores: Before softmax or sigmoid.
            threshold: Of the probability of a class, where each row has several.
        """
        scores = scores.float()
        if not self.classes:
            probability = scores.sigmoid()
            return _or_null((probability >= threshold).to(torch.int8), scores), probability
        best = scores.argmax(1)
        if self.spark_type == "string":
            return _or_null([self.classes[number] for number in best.tolist()], scores), scores.softmax(1)
        return _or_null(torch.tensor(self.classes)[best.cpu()], scores), scores.softmax(1)


def _or_null(predicted: torch.Tensor | list[Any], scores: torch.Tensor) -> torch.Tensor | list[Any]:
    """Predictions, None where scores are NaN."""
    nothing = scores.isnan().any(1).tolist()
    if not any(nothing):
        return predicted
    values = predicted if isinstance(predicted, list) else predicted.tolist()
    return [None if no else value for value, no in zip(values, nothing, strict=True)]


def _of_classes(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (scores.argmax(1) == labels).float().mean()


def _of_each(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return ((scores > 0) == (labels > 0.5)).float().mean()


for _metric in (_of_classes, _of_each):
    _metric.__name__ = "accuracy"  # its name in the history; pickled by __qualname__


def labels_of(df: DataFrame, column: str, features: str, who: str) -> Labels:
    """The classes of ``column``, from all rows; one job.

    Args:
        df: Of the fit.
        column: Text, numbers or booleans; or arrays of 0 and 1.
        features: The column beside it, which may have no nulls either.
        who: Asks for it; the Spark UI shows the name.

    Raises:
        DataError: nulls, with their number; arrays of several lengths; one class, or very many; another type.
    """
    kind, text = df.schema[column].dataType, df.schema[column].dataType.simpleString()
    missing = F.sum(F.col(quoted(features)).isNull().cast("int")).alias("missing")
    if isinstance(kind, T.ArrayType) and isinstance(kind.elementType, T.NumericType):
        return _several(df, column, features, text, missing, who)
    if not isinstance(kind, T.NumericType | T.StringType | T.BooleanType):
        raise DataError(
            f"label column {column!r} is of type {text}: expected text, numbers or booleans that are classes, or "
            "arrays with 0 or 1 for each class"
        )
    grouped = df.groupBy(F.col(quoted(column)).alias("class")).agg(F.count("*").alias("rows"), missing)
    with job_named(grouped, f"spark_hvd: {who} looks for the classes of {column!r}"):
        rows = grouped.limit(MOST_CLASSES + 1).collect()
    everything = sum(row["rows"] for row in rows)
    _check_nulls(features, sum(row["missing"] for row in rows), everything)
    _check_nulls(column, sum(row["rows"] for row in rows if row["class"] is None), everything)
    classes = [_plain(row["class"], text) for row in rows]
    if any(isinstance(each, float) and math.isnan(each) for each in classes):
        raise DataError(f"label column {column!r} has NaN: drop these rows before fit")
    if not 2 <= len(classes) <= MOST_CLASSES:
        has = f"more than {MOST_CLASSES:,} values" if classes else "no rows"
        has = f"one value only, {classes[0]!r}" if len(classes) == 1 else has
        raise DataError(f"label column {column!r} has {has}: expected from 2 to {MOST_CLASSES:,} classes")
    return Labels(column, text, len(classes), tuple(sorted(classes)))


def _several(df: DataFrame, column: str, features: str, text: str, missing: Any, who: str) -> Labels:
    values = F.col(quoted(column))
    wrong = F.exists(values, lambda each: each.isNull() | ((each != 0) & (each != 1)))
    found = df.agg(
        F.count("*").alias("rows"),
        missing,
        F.sum(values.isNull().cast("int")).alias("nulls"),
        F.min(F.size(values)).alias("shortest"),
        F.max(F.size(values)).alias("longest"),
        F.sum(wrong.cast("int")).alias("wrong"),
    )
    with job_named(found, f"spark_hvd: {who} looks for the classes of {column!r}"):
        row = found.collect()[0]
    if not row["rows"]:
        raise DataError(f"label column {column!r} has no rows: expected at least one")
    _check_nulls(features, row["missing"], row["rows"])
    _check_nulls(column, row["nulls"], row["rows"])
    if row["shortest"] != row["longest"] or not row["longest"]:
        raise DataError(
            f"label column {column!r} has arrays of {row['shortest']} to {row['longest']} values: expected 0 or 1 "
            "for each class, the same number in all rows"
        )
    if row["wrong"]:
        raise DataError(f"label column {column!r} has {row['wrong']} arrays with other values than 0 and 1")
    return Labels(column, text, row["longest"])


def _check_nulls(column: str, nulls: int, rows: int) -> None:
    if nulls:
        raise DataError(
            f"column {column!r} has {nulls} null(s) in {rows} rows: fill them or drop these rows before fit, for "
            f"example df.na.drop(subset=[{column!r}])"
        )


def _plain(value: Any, text: str) -> Any:
    """A class as JSON has it; decimals are floating point then."""
    return value if text in _INTEGERS or text == "string" else float(value)
