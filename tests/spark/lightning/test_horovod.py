"""Subclasses of ``horovod.spark.lightning``'s classes, written like SynapseML's text classifier and its model."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import lightning as L  # noqa: N812 - the usual name
import numpy as np
import pytest
import torch
from pyspark.ml.param import Param, Params
from torch import nn

from spark_hvd.estimators import Store
from spark_hvd.estimators.lightning.horovod import HorovodEstimator, HorovodModel

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.spark.lightning.support import Warm

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(128, 8), nn.Linear(8, 2)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = self.head(self.table(ids).mean(1))
        return logits if labels is None else nn.functional.cross_entropy(logits, labels)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss: torch.Tensor = self(**batch)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.05)


def ids_of(text: str) -> torch.Tensor:
    return torch.tensor([ord(letter) for letter in text.ljust(6)[:6]])


class TextModel(HorovodModel):
    letters = Param(Params._dummy(), "letters", "how many count")

    def __init__(self, **values: Any) -> None:
        super().__init__()
        self._setDefault(feature_columns=["text"], label_columns=["label"], outputCols=["output"], letters=6)
        self._set(**values)

    def get_prediction_fn(self) -> Callable[[Any, Any], torch.Tensor]:
        letters = self.getOrDefault(self.letters)

        def of_row(model: Any, row: Any) -> torch.Tensor:
            with torch.no_grad():
                found: torch.Tensor = model(ids_of(row["text"][:letters]).unsqueeze(0)).softmax(-1)
            return found

        return of_row


class TextEstimator(HorovodEstimator):
    letters = Param(Params._dummy(), "letters", "how many count")

    def __init__(self, **values: Any) -> None:
        super().__init__()
        self._setDefault(feature_cols=["text"], label_cols=["label"], letters=6)
        self._set(**values)
        self.setTransformationEditFields([("ids", int, None, True), ("labels", int, None, False)])
        self.setTransformationRemovedFields(["text", "label"])
        self.setTransformationFn(
            lambda row: {"ids": ids_of(row["text"]).numpy(), "labels": torch.tensor(row["label"], dtype=int)}  # type: ignore[call-overload]
        )
        self._set(model=Net())

    def get_model_class(self) -> type[HorovodModel]:
        return TextModel

    def _get_model_kwargs(self, model: Any, history: Any, optimizer: Any, run_id: str, metadata: Any) -> dict[str, Any]:
        common = {"model": model, "history": history, "optimizer": optimizer, "run_id": run_id, "_metadata": metadata}
        return {**common, "loss": self.getLoss(), "letters": self.getOrDefault(self.letters)}


def test_a_classifier_of_text_as_synapseml_has_it(spark: SparkSession, warm: Warm, tmp_path: Path) -> None:
    rows = [("abab" if number % 2 else "yzyz", float(number % 2)) for number in range(64)]
    df = spark.createDataFrame(rows, "text string, label double").repartition(2)
    estimator = TextEstimator(
        backend=warm, store=Store.create(tmp_path), batch_size=8, epochs=4, random_seed=1, verbose=0, letters=4
    )
    model = estimator.fit(df)
    assert isinstance(model, TextModel)
    assert (len(model.getHistory()), model.getOrDefault("letters"), model.getOutputCols()) == (4, 4, ["output"])
    found = model.transform(df).collect()
    assert [int(np.argmax(row.output)) for row in found] == [int(row.label) for row in found]
    wanted = model.get_prediction_fn()(model.getModel(), found[0]).flatten()
    assert found[0].output.toArray() == pytest.approx(wanted.double().numpy(), abs=1e-6)
    model.write().save(str(tmp_path / "model"))
    loaded = TextModel.load(str(tmp_path / "model"))
    assert loaded.getOrDefault("letters") == 4
    assert loaded.transform(df).first() == model.transform(df).first()
