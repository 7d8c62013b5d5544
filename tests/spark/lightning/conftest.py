"""Two ranks and Python workers that have Lightning loaded, rows, and an estimator of both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from spark_hvd.estimators import LightningEstimator, Store
from tests.conftest import workers_with

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from tests.spark.lightning.support import Warm

ROWS = 401


@pytest.fixture(scope="module")
def spark(spark: SparkSession) -> Iterator[SparkSession]:
    with workers_with(spark, "lightning"):
        yield spark


@pytest.fixture(scope="package")
def warm() -> Iterator[Warm]:
    from tests.spark.lightning.support import Warm  # imports Lightning, which other tests do without

    backend = Warm()
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def df(spark: SparkSession) -> DataFrame:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(ROWS, 4, generator=generator)
    target = features @ torch.tensor([1.0, -2.0, 0.5, 3.0]) + 1.0
    rows = [(x, y, float(y > 1)) for x, y in zip(features.tolist(), target.tolist(), strict=True)]
    return spark.createDataFrame(rows, "features array<float>, y float, positive double").repartition(3).cache()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store's folder: one for all, so that the DataFrame is written once."""
    return tmp_path_factory.mktemp("store")


@pytest.fixture
def estimator(warm: Warm, folder: Path) -> Callable[..., LightningEstimator]:
    return partial(
        LightningEstimator,
        backend=warm,
        store=Store.create(folder),
        feature_cols=["features"],
        label_cols=["y"],
        batch_size=32,
        epochs=3,
        random_seed=1,
        verbose=0,
        logger=False,
    )
