"""Which data sets a run accepts and which it refuses; columns of any name reach ranks under that name."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import cloudpickle
import pyarrow as pa
import pytest
from pyspark.sql import functions as F  # noqa: N812

from spark_hvd import DataError
from spark_hvd.runner import run
from spark_hvd.runner.launch.data import run_data_of
from tests.spark.data_support import table_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.usefixtures("no_leaks")
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (5, TypeError, r"data\['train'\] is of type int: expected a Spark DataFrame; a pandas"),
        (pa.table({"__id": [1]}), ValueError, "has a column '__id'"),
        (pa.table({"__Source": [1]}), ValueError, "has a column '__Source'"),
        (pa.table({}), ValueError, "has no columns"),
        (pa.Table.from_arrays([[1], [2]], names=["x", "x"]), ValueError, "more than one column 'x'"),
    ],
)
def test_values_that_are_no_data(value: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        run_data_of({"train": value})
    with pytest.raises(TypeError, match=r"expected data sets by name, such as \{\"train\": df\}"):
        run_data_of([value])  # type: ignore[arg-type]


def test_any_name_of_a_column(spark: SparkSession) -> None:
    def fn() -> tuple[list[str], list[list[Any]]]:
        rows = table_of("train")
        return rows.column_names, [list(row.values()) for row in rows.to_pylist()]

    odd = spark.range(8).select(
        "id", (F.col("id") * 2).alias("a.dot"), (F.col("id") * 3).alias("back`tick"), F.lit(5).alias("c0")
    )
    shares = run(fn, num_proc=2, data={"train": odd}, spark=spark, verbose=0)
    assert [names for names, _ in shares] == [["id", "a.dot", "back`tick", "c0"]] * 2
    assert sorted(row for _, rows in shares for row in rows) == [[i, 2 * i, 3 * i, 5] for i in range(8)]


def test_names_that_differ_by_case_in_a_session_of_its_own(spark: SparkSession) -> None:
    def fn() -> list[tuple[Any, ...]]:
        rows = table_of("train")
        assert rows.column_names == ["a", "A"]
        return list(zip(*(column.to_pylist() for column in rows.columns), strict=True))

    exact = spark.newSession()
    exact.conf.set("spark.sql.caseSensitive", "true")
    cased = exact.range(8).select(F.col("id").alias("a"), (F.col("id") * 2).alias("A"))
    with ThreadPoolExecutor(1) as pool:  # the first session is the active one there
        shares = pool.submit(run, fn, num_proc=2, data={"train": cased}, spark=spark, verbose=0).result()
    assert sorted(row for share in shares for row in share) == [(i, 2 * i) for i in range(8)]


@pytest.mark.parametrize("kind", ["arrow", "pandas"])
def test_a_table_without_rows_is_refused_before_anything_starts(kind: str) -> None:
    table = pa.table({"x": pa.array([], pa.int64())})
    with pytest.raises(DataError, match=r"data\['train'\] has no rows: expected at least one for each rank"):
        run_data_of({"train": table if kind == "arrow" else table.to_pandas()})


def test_a_frame_of_pandas_on_spark_says_how_to_pass_it(spark: SparkSession) -> None:
    frame = type("DataFrame", (), {"__module__": "pyspark.pandas.frame"})()
    with pytest.raises(TypeError, match=r"data\['train'\] is a DataFrame of pandas on Spark: pass frame\.to_spark\(\)"):
        run_data_of({"train": frame})


def test_names_that_only_case_tells_apart_are_refused_where_spark_does_not(spark: SparkSession) -> None:
    cased = spark.createDataFrame([(1, 2)], "a int, A int")
    with pytest.raises(ValueError, match=r"data\['train'\] has more than one column 'A'.*spark\.sql\.caseSensitive"):
        run(len, num_proc=1, args=((),), data={"train": cased}, spark=spark)
