"""Tests of the folder are left out where Keras is not installed; they share rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.spark.estimator_support import frame

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@pytest.fixture(scope="package", autouse=True)
def _with_keras() -> None:
    pytest.importorskip("keras")


@pytest.fixture(scope="module")
def df(spark: SparkSession) -> DataFrame:
    return frame(spark).cache()
