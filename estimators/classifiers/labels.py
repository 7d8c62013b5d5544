"""The classes of a label column: numbers for the loss, and values in predictions; in ranks and in Python workers."""

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
        """Return JSON-ready values."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Labels:
        """Undo :meth:`to_json`."""
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
            DataError: A value is none of the classes.
        """
        if not self.classes:
            numbers = values.flatten().cast(pa.float32()).to_numpy()
            return torch.tensor(numbers, device="cpu").reshape(len(values), -1)
        found = pc.index_in(values, value_set=pa.array(self.classes).cast(values.type))
        if found.null_count:
            strange = values.filter(found.is_null()).unique().to_pylist()
            raise DataError(
                f"column {self.column!r} has values that were not there when fit collected the classes: "
                f"{listed(strange)}. Expected the same rows whenever they are computed: use df.cache(), or give rand() "
                "a seed"
            )
        return torch.tensor(found.to_numpy(), device="cpu").long()

    @property
    def prediction_type(self) -> str:
        """The type of predicted labels: text, boolean and arrays as in the data, numbers as double for evaluators."""
        same = self.spark_type in ("string", "boolean") or not self.classes
        return self.spark_type if same else "double"

    def predicted(self, scores: torch.Tensor, threshold: float) -> tuple[Any, torch.Tensor]:
        """Predicted labels, and probabilities (rows, size); of ``scores`` (rows, size) before softmax or sigmoid.

        The threshold is that of a class's probability, where each row has several.
        """
        scores = scores.float()
        if not self.classes:
            probability = scores.sigmoid()
            return _or_null((probability >= threshold).to(torch.int8), scores), probability
        best = scores.argmax(1)
        if self.spark_type == "string":
            return _or_null([self.classes[number] for number in best.tolist()], scores), scores.softmax(1)
        return _or_null(torch.tensor(self.classes, device="cpu")[best.cpu()], scores), scores.softmax(1)


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
