"""``NeuralClassificationModel``: what a classifier's fit returns. It appends classes and probabilities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from pyspark.ml import Model

from spark_hvd.estimators.classifiers.labels import Labels
from spark_hvd.estimators.classifiers.tables import LABELS_FROM_JSON
from spark_hvd.estimators.classifiers.training import Inputs
from spark_hvd.estimators.data.columns import session_of
from spark_hvd.estimators.inference.function import predict
from spark_hvd.estimators.params.persistence import SavedParams
from spark_hvd.estimators.training.history import History
from spark_hvd.estimators.transform.frame import check_new

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pyspark.sql import DataFrame


class NeuralClassificationModel(SavedParams, Model):
    """Base class of trained classifiers. A saved model holds a pickle of code: only load models that you trust."""

    _from_json: ClassVar = LABELS_FROM_JSON
    _column: ClassVar[str]

    @property
    def classes(self) -> list[Any]:
        """The values of the label, in the order of the probabilities; empty if labels are arrays of 0 and 1."""
        return list(self.value_of("labels").classes)

    def plot_loss(self, metric: str | Sequence[str] = "loss") -> Figure:
        """Draw a loss or metric over the epochs as a matplotlib figure, training and validation together.

        Args:
            metric: A key of the history, or several, which are drawn side by side.

        Raises:
            ValueError: The key does not exist.
            ImportError: matplotlib is not installed.
        """
        return History(self.value_of("history") or []).plot((metric,) if isinstance(metric, str) else metric)

    def _transform(self, dataset: DataFrame) -> DataFrame:
        session_of(dataset, "transform")
        settings: Mapping[str, Any] = {row.name: self.value_of(row.name) for row in self._table}
        labels: Labels = settings["labels"]
        types = {"prediction_col": labels.prediction_type, "probability_col": "vector"}
        outputs = {settings[name]: kind for name, kind in types.items() if settings[name]}
        check_new(dataset, list(outputs), "transform", "prediction_col and probability_col ('' omits one)")
        if not outputs:
            return dataset
        names = settings["prediction_col"], settings["probability_col"]
        return predict(
            dataset,
            _Scored(self._wrapped(settings["model"]), labels, names, settings["threshold"]),
            columns=[settings[self._column]],
            outputs=outputs,
            collate=_Arguments(self._inputs(settings)),
            batch_size=settings["batch_size"],
            use_gpu=settings["use_gpu"],
        )

    # -- methods that a subclass overrides

    def _inputs(self, settings: Mapping[str, Any]) -> Inputs:
        """Return the function that makes the model's tensors."""
        raise NotImplementedError

    def _wrapped(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the model that maps these tensors, in order, to logits."""
        return model


@dataclass(frozen=True)
class _Arguments:
    """Makes a model's arguments from the values of a column, in Spark's Python workers."""

    inputs: Inputs

    def __call__(self, values: list[Any]) -> tuple[torch.Tensor, ...]:
        return tuple(self.inputs(values, training=False).values())


class _Scored(torch.nn.Module):
    """Wraps a model, and returns predicted labels and probabilities by column name; "" omits either."""

    def __init__(self, model: torch.nn.Module, labels: Labels, names: tuple[str, str], threshold: float) -> None:
        super().__init__()
        self.model, self.labels, self.names, self.threshold = model, labels, names, threshold

    def forward(self, *tensors: torch.Tensor) -> dict[str, Any]:
        outputs = self.labels.predicted(self.model(*tensors), self.threshold)
        return {name: values for name, values in zip(self.names, outputs, strict=True) if name}
