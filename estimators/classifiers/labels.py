"""The classes of a label column: numbers for the loss in ranks, and values for predictions in Python workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import nn

from spark_hvd.data.readers.dataset import listed
from spark_hvd.data.readers.errors import DataError


@dataclass(frozen=True)
class Labels:
    """The classes of a label column.

    Attributes:
        column: Name of the column.
        spark_type: Type of the column, as Spark's ``simpleString``.
        size: Number of classes.
        classes: The sorted values of the classes, in the order of the model's scores; empty if labels are arrays with 0
            or 1 for each class (multi-label).
    """

    column: str
    spark_type: str
    size: int
    classes: tuple[Any, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Labels:
        """Undo :meth:`to_json`."""
        return cls(**{**data, "classes": tuple(data["classes"])})

    @property
    def loss(self) -> nn.Module:
        """The loss function of scores (rows, size) and labels from :meth:`tensor`."""
        return nn.CrossEntropyLoss() if self.classes else nn.BCEWithLogitsLoss()

    @property
    def accuracy(self) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        """The metric: the share of correct predictions among scores (rows, size) and labels from :meth:`tensor`."""
        return _single_label_accuracy if self.classes else _multi_label_accuracy

    def tensor(self, values: pa.Array) -> torch.Tensor:
        """Return the class numbers, (rows,) int64; for multi-label arrays, their values, (rows, size) float32.

        Raises:
            DataError: A value is not one of the classes.
        """
        if not self.classes:
            numbers = values.flatten().cast(pa.float32()).to_numpy()
            return torch.tensor(numbers, device="cpu").reshape(len(values), -1)
        indices = pc.index_in(values, value_set=pa.array(self.classes).cast(values.type))
        if indices.null_count:
            unknown = values.filter(indices.is_null()).unique().to_pylist()
            raise DataError(
                f"column {self.column!r} has values that were missing when fit collected the classes: "
                f"{listed(unknown)}. Expected the same rows whenever they are computed: use df.cache(), or give rand() "
                "a seed"
            )
        return torch.tensor(indices.to_numpy(), device="cpu").long()

    @property
    def prediction_type(self) -> str:
        """The type of predicted labels: text, boolean and arrays as in the data, numbers as double for evaluators."""
        same = self.spark_type in ("string", "boolean") or not self.classes
        return self.spark_type if same else "double"

    def predicted(self, scores: torch.Tensor, threshold: float) -> tuple[Any, torch.Tensor]:
        """Return predicted labels and probabilities (rows, size) for ``scores`` (rows, size).

        Scores are values before softmax or sigmoid. For multi-label arrays, a class whose probability reaches
        ``threshold`` is predicted.
        """
        scores = scores.float()
        if not self.classes:
            probability = scores.sigmoid()
            return _or_null((probability >= threshold).to(torch.int8), scores), probability
        best = scores.argmax(1)
        if self.spark_type == "string":
            return _or_null([self.classes[number] for number in best.tolist()], scores), scores.softmax(1)
        dtype = torch.float64 if isinstance(self.classes[0], float) else None  # float32 would change most of them
        return _or_null(torch.tensor(self.classes, dtype=dtype, device="cpu")[best.cpu()], scores), scores.softmax(1)


def _or_null(predicted: torch.Tensor | list[Any], scores: torch.Tensor) -> torch.Tensor | list[Any]:
    """Return the predictions, with None for rows that have a score of NaN."""
    missing = scores.isnan().any(1).tolist()
    if not any(missing):
        return predicted
    values = predicted if isinstance(predicted, list) else predicted.tolist()
    return [None if is_missing else value for value, is_missing in zip(values, missing, strict=True)]


def _single_label_accuracy(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (scores.argmax(1) == labels).float().mean()


def _multi_label_accuracy(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return ((scores > 0) == (labels > 0.5)).float().mean()


for _metric in (_single_label_accuracy, _multi_label_accuracy):
    _metric.__name__ = "accuracy"  # the name in the history; pickle uses __qualname__
