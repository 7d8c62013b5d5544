"""Ids and amounts pass through a fit, transform and pyfunc in the requested dtype, without losing a digit."""

from __future__ import annotations

import re
import sys
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import pytest
import torch
from torch import nn

import spark_hvd
from spark_hvd import DataError
from spark_hvd.estimators import LocalBackend, Store, TorchEstimator

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

cloudpickle.register_pickle_by_value(sys.modules[__name__])

IDS = [16_777_217, 16_777_219, 16_777_221, 16_777_223]


class Checks(nn.Module):
    """Fails if an id or an amount differs."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, ids: torch.Tensor, amount: torch.Tensor) -> torch.Tensor:
        assert ids.dtype == torch.int64
        assert amount.dtype == torch.float64
        # Some are requested with zeros, which reveal the outputs' shapes.
        assert not ids.any() or (set(ids.tolist()) <= set(IDS) and bool((amount == 12345678901.25).all()))
        return self.scale * (ids % 2).float()


def estimator(**params: Any) -> TorchEstimator:
    settings: dict[str, Any] = {
        "model": Checks(),
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
        "loss": nn.MSELoss(),
        "feature_cols": ["id", "amount"],
        "label_cols": ["y"],
        "input_dtypes": ["int64", "float64"],
        "backend": LocalBackend(1),
        "batch_size": 2,
        "epochs": 1,
        "verbose": 0,
    }
    return TorchEstimator(**{**settings, **params})


@pytest.mark.parametrize("kind", ["double", pytest.param("decimal(20,0)", marks=pytest.mark.slow), "bigint"])
def test_the_numbers_themselves(spark: SparkSession, tmp_path: Path, kind: str) -> None:
    rows = [(each, Decimal("12345678901.25"), 1.0) for each in IDS]
    df = spark.createDataFrame(rows, "id long, amount decimal(20,2), y double").selectExpr(
        f"cast(id as {kind}) id", "amount", "y"
    )
    fitted = estimator(store=Store.create(str(tmp_path))).fit(df)
    assert fitted.transform(df).count() == 4
    assert len(fitted.transform(df).select("y__output").collect()) == 4


class Taken(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.dtype == torch.float32
        return x


@pytest.mark.parametrize("kind", ["double", "decimal(20,2)"])
def test_predict_rounds_no_ids(spark: SparkSession, kind: str) -> None:
    def predicted(*values: float) -> list[float]:
        df = spark.createDataFrame([(each,) for each in values], "x double").selectExpr(f"cast(x as {kind}) x")
        return [row[1] for row in spark_hvd.predict(df, Taken(), columns="x", outputs="float").collect()]

    assert predicted(16777216.0, 0.5, -16777218.0, 1e17) == [16777216.0, 0.5, -16777218.0, pytest.approx(1e17)]
    for odd in (16777217.0, -1732534323.0, 1e39)[: 3 if kind == "double" else 2]:
        with pytest.raises(
            Exception, match=rf"column 'x' of {re.escape(kind)} has .*, which float32 cannot hold: cast it"
        ):
            predicted(1.0, odd)


def test_what_is_lost_is_an_error(spark: SparkSession) -> None:
    df = spark.createDataFrame([(1.0, 1.0, 2.5), (1.0, 1.0, 1.0)], "id double, amount double, y double")
    with pytest.raises(DataError, match=r"column 'y' has 1 of 2 values that int64 cannot hold, first the .* 2.5"):
        estimator(label_dtypes=["int64"]).fit(df)
    df = spark.createDataFrame([(Decimal(2**53 + 1), 1.0, 1.0)], "id decimal(20,0), amount double, y double")
    with pytest.raises(Exception, match=r"column 'id' of decimal\(20,0\) has 9007199254740993"):
        estimator().fit(df)
