"""Skips the folder's tests without Keras; they share rows, and Python workers that have it loaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.conftest import workers_with
from tests.spark.estimator_support import frame

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@pytest.fixture(scope="package", autouse=True)
def _with_keras() -> None:
    pytest.importorskip("keras")


@pytest.fixture(scope="module")
def spark(spark: SparkSession) -> Iterator[SparkSession]:
    with workers_with(spark, "keras"):
        yield spark


@pytest.fixture(scope="module")
def df(spark: SparkSession) -> DataFrame:
    return frame(spark).cache()
