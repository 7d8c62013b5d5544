"""Fixtures of the tests of models on Spark."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["arrow_udf", pytest.param("pandas_udf", marks=pytest.mark.slow)])
def each_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use both ways to Python: the Arrow UDF of Spark from 4.1 on, and the pandas UDF before."""
    from pyspark.sql import functions as F  # noqa: N812

    if request.param == "pandas_udf":
        monkeypatch.delattr(F, "arrow_udf", raising=False)
    elif not hasattr(F, "arrow_udf"):
        pytest.skip("this Spark has no arrow_udf")
