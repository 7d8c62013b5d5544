"""Rows and a module for the tests of TorchModel.transform, and the expected columns."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np
import torch
from pyspark.ml.feature import VectorAssembler
from torch import nn

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def hundred_rows(spark: SparkSession) -> DataFrame:
    """Return rows with id, a (float), b (double), whole (int), label (double, 0 1 2), features (vector of a, b)."""
    frame = spark.range(0, 100, 1, 2).selectExpr(
        "id", "cast(id as float) a", "id / 2 as b", "cast(id as int) whole", "cast(id % 3 as double) label"
    )
    return VectorAssembler(inputCols=["a", "b"], outputCol="features").transform(frame).cache()


def expected(model: nn.Module, frame: DataFrame) -> np.ndarray[Any, Any]:
    rows = torch.tensor([[row.a, row.b] for row in frame.orderBy("id").collect()], dtype=torch.float32)
    with torch.inference_mode():
        return model.eval()(rows).double().numpy()  # type: ignore[no-any-return]


def net(outputs: int, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, outputs))
