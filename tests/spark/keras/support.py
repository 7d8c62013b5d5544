"""A small Keras model, an estimator of it on two ranks, and the content of its prediction column."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np

from spark_hvd.estimators import KerasEstimator, KerasModel, LocalBackend
from tests.later import Later

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

keras: Any = Later("keras")


def net(outputs: int = 1, activation: str | None = None, dropout: float = 0.0) -> Any:
    random.seed(7)
    layers = [keras.layers.Input((3,)), keras.layers.Dense(4, "tanh"), keras.layers.Dropout(dropout)]
    return keras.Sequential([*layers, keras.layers.Dense(outputs, activation)])


def estimator(model: Any, **params: Any) -> KerasEstimator:
    defaults: dict[str, Any] = {
        "model": model,
        "optimizer": keras.optimizers.SGD(0.05, momentum=0.9),
        "loss": "mse",
        "feature_cols": ["features"],
        "label_cols": ["value"],
        "backend": LocalBackend(2),
        "batch_size": 30,
        "epochs": 2,
        "verbose": 0,
        "random_seed": 1,
        "shuffle": False,
    }
    return KerasEstimator(**{**defaults, **params})


def predicted(model: KerasModel, df: DataFrame, column: str) -> np.ndarray[Any, Any]:
    return np.array([row[0] for row in model.transform(df).orderBy("row").select(column).collect()])
