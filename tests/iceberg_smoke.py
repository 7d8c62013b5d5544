"""Iceberg tables that Spark writes with Iceberg's own jars: ranks read the rows that Spark sees.

tests/matrix.py runs it in an environment with those jars, which are for Spark 3.5.
"""

from __future__ import annotations

import logging
import os
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import pytest

import spark_hvd
from tests.conftest import LOCAL, start_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.timeout(1200)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # executors cannot import tests

CREATE = "CREATE TABLE {t} (id INT, name STRING, day DATE, price DECIMAL(9, 2), at TIMESTAMP_NTZ) USING iceberg"
FILL = """
    INSERT INTO {t} SELECT cast(id AS INT), concat('n', id % 7), date '2024-01-30' + cast(id % 40 AS INT),
    cast(id AS DECIMAL(9, 2)) / 4, timestamp_ntz '2024-03-10 02:30:00' + make_interval(0, 0, 0, 0, id) FROM range(200)
"""
DELETE = ("DELETE FROM {t} WHERE id % 5 = 0", "UPDATE {t} SET name = 'new' WHERE id BETWEEN 7 AND 20")
ON_READ = ", ".join(f"'write.{each}.mode' = 'merge-on-read'" for each in ("delete", "update", "merge"))
TABLES: dict[str, tuple[str, ...]] = {
    "rows_deleted_by_copying": (CREATE, FILL, *DELETE),
    "rows_deleted_by_position": (f"{CREATE} TBLPROPERTIES ('format-version' = '2', {ON_READ})", FILL, *DELETE),
    "rows_deleted_by_vectors": (
        f"{CREATE} PARTITIONED BY (bucket(3, id)) TBLPROPERTIES ('format-version' = '3', {ON_READ})",
        FILL,
        *DELETE,
        "DELETE FROM {t} WHERE id % 7 = 1",
    ),
    "vectors_after_positions": (
        f"{CREATE} TBLPROPERTIES ('format-version' = '2', {ON_READ})",
        FILL,
        *DELETE,
        "ALTER TABLE {t} SET TBLPROPERTIES ('format-version' = '3')",
        "DELETE FROM {t} WHERE id % 7 = 1",
    ),
    "partitions_that_change": (
        f"{CREATE} PARTITIONED BY (days(day)) TBLPROPERTIES ({ON_READ})",
        FILL,
        "ALTER TABLE {t} DROP PARTITION FIELD days(day)",
        "ALTER TABLE {t} ADD PARTITION FIELD truncate(1, name)",
        FILL,
        *DELETE,
        "ALTER TABLE {t} REPLACE PARTITION FIELD truncate(1, name) WITH bucket(2, id)",
        FILL,
    ),
    "columns_that_change": (
        CREATE,
        FILL,
        "ALTER TABLE {t} RENAME COLUMN name TO called",
        "ALTER TABLE {t} DROP COLUMN at",
        "ALTER TABLE {t} ADD COLUMN at STRING FIRST",
        "ALTER TABLE {t} ALTER COLUMN id TYPE BIGINT",
        "ALTER TABLE {t} ALTER COLUMN price TYPE DECIMAL(20, 2)",
        "ALTER TABLE {t} ADD COLUMN inside STRUCT<a: INT, b: ARRAY<INT>>",
        "INSERT INTO {t} VALUES ('x', 2147483648, 'y', date '2024-01-01', 1.5, named_struct('a', 1, 'b', array(2, 3)))",
        "ALTER TABLE {t} RENAME COLUMN inside.a TO c",
        "ALTER TABLE {t} ADD COLUMN inside.d STRING",
        "ALTER TABLE {t} ALTER COLUMN inside.c TYPE BIGINT",
    ),
    "files_written_anew": (
        f"{CREATE} TBLPROPERTIES ({ON_READ})",
        FILL,
        FILL,
        *DELETE,
        "CALL local.system.rewrite_data_files(table => '{t}', options => map('rewrite-all', 'true'))",
        "DELETE FROM {t} WHERE id % 11 = 0",
        "CALL local.system.rewrite_manifests('{t}')",
        "CALL local.system.rewrite_position_delete_files(table => '{t}', options => map('rewrite-all', 'true'))",
        "CALL local.system.expire_snapshots(table => '{t}', older_than => timestamp '2100-01-01', retain_last => 1)",
    ),
    "rolled_back": (CREATE, FILL, "DELETE FROM {t} WHERE id < 50", "ROLLBACK"),
}


READ_BY_SPARK: dict[str, tuple[str, ...]] = {
    "orc": (f"{CREATE} TBLPROPERTIES ('write.format.default' = 'orc')", FILL),
    "partitions_in_names_of_directories_alone": (
        "CREATE TABLE {t} (id BIGINT, half INT) USING iceberg PARTITIONED BY (half)",
        "CALL local.system.add_files(table => '{t}', source_table => '`parquet`.`{others}`')",
        "ALTER TABLE {t} RENAME COLUMN id TO number",
        "INSERT INTO {t} VALUES (1000, 7)",
    ),
}


JACKSON = (b"iceberg/shaded/org/apache/parquet/shaded/com/fasterxml/", b"iceberg/shaded/com/fasterxml/")
"""The package's jar lacks one of its two copies of Jackson: where the other is, and where this one belongs."""
SIZES = {3: 4, 4: 4, 5: 8, 6: 8, 7: 2, 8: 2, 9: 4, 10: 4, 11: 4, 12: 4, 15: 3, 16: 2, 17: 4, 18: 4, 19: 2, 20: 2}
"""Sizes of a Java class's constants in bytes, by tag; a text, 1, contains its own size."""


def moved(name: bytes) -> bytes:
    dotted = (name.replace(b"/", b".") for name in JACKSON)
    return name.replace(*JACKSON).replace(*dotted)


def moved_class(data: bytes) -> bytes:
    """Return a class file that refers to Jackson and to itself by other names."""
    head, at, number = bytearray(data[:10]), 10, 1
    while number < int.from_bytes(data[8:10], "big"):
        tag = data[at]
        if tag == 1:
            end = at + 3 + int.from_bytes(data[at + 1 : at + 3], "big")
            text = moved(data[at + 3 : end])
            head += bytes([tag]) + len(text).to_bytes(2, "big") + text
        else:
            end = at + 1 + SIZES[tag]
            head += data[at:end]
        at, number = end, number + (2 if tag in (5, 6) else 1)
    return bytes(head) + data[at:]


def add_jackson(jar: Path, to: Path) -> None:
    with zipfile.ZipFile(jar) as old, zipfile.ZipFile(to, "w") as new:
        for name in old.namelist():
            if JACKSON[0] in name.encode() and name.endswith(".class"):
                new.writestr(moved(name.encode()).decode(), moved_class(old.read(name)))


@pytest.fixture(scope="module")
def warehouse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("warehouse")


@pytest.fixture(scope="module")
def spark(warehouse: Path) -> SparkSession:
    jars = [*Path(sys.prefix).glob("lib/*/site-packages/*/**/iceberg-spark-runtime-3.5_2.12-*.jar")]
    assert jars, "the row `iceberg` of tests/matrix.py installs them"
    add_jackson(jars[0], warehouse / "jackson.jar")
    os.environ["PYSPARK_SUBMIT_ARGS"] = f"--driver-class-path {jars[0]}:{warehouse}/jackson.jar pyspark-shell"
    settings = {
        "spark.sql.extensions": "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions",
        "spark.sql.catalog.local": "org.apache.iceberg.spark.SparkCatalog",
        "spark.sql.catalog.local.type": "hadoop",
        "spark.sql.catalog.local.warehouse": str(warehouse),
        "spark.sql.session.timeZone": "UTC",
    }
    session = start_session(LOCAL, **settings)
    others = session.range(20).selectExpr("id", "cast(id % 2 AS INT) AS half")
    others.write.partitionBy("half").parquet(str(warehouse / "others"))
    return session


def made(spark: SparkSession, warehouse: Path, name: str) -> tuple[str, Path]:
    """Create the table called ``name`` with its statements. Return its full name and its folder."""
    table = f"local.db.{name}"
    for statement in {**TABLES, **READ_BY_SPARK}[name]:
        if statement == "ROLLBACK":
            first = spark.sql(f"SELECT snapshot_id FROM {table}.snapshots ORDER BY committed_at").first()
            assert first is not None
            statement = f"CALL local.system.rollback_to_snapshot('{{t}}', {first.snapshot_id})"
        spark.sql(statement.format(t=table, others=warehouse / "others"))
    return table, warehouse / "db" / name


def rows() -> list[str]:
    import spark_hvd.torch as hvd

    batches = hvd.get_dataset_shard("train").arrow_batches()
    return [repr(row) for batch in batches for row in batch.to_pylist()]


def seen_by_spark(spark: SparkSession, table: str) -> list[str]:
    return sorted(repr(row.asDict(recursive=True)) for row in spark.table(table).collect())


@pytest.mark.parametrize("name", TABLES)
def test_ranks_read_in_place_what_spark_sees(spark: SparkSession, warehouse: Path, name: str) -> None:
    table, folder = made(spark, warehouse, name)
    ranks = spark_hvd.run_local(rows, data={"train": folder}, num_proc=2, verbose=0)
    expected = seen_by_spark(spark, table)
    assert len(expected) > 20
    assert sorted(row for each in ranks for row in each) == expected


@pytest.mark.parametrize("name", READ_BY_SPARK)
def test_what_ranks_cannot_read_is_read_by_spark(
    spark: SparkSession, warehouse: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    table, folder = made(spark, warehouse, name)
    data: dict[str, Any] = {"train": folder}
    with pytest.raises(spark_hvd.DataError, match=r"Next: .*pass the DataFrame that Spark reads from the table"):
        spark_hvd.run_local(rows, data=data, num_proc=2, verbose=0)
    with caplog.at_level(logging.WARNING, "spark_hvd"):
        ranks = spark_hvd.run(rows, data=data, num_proc=2, spark=spark, verbose=0)
    assert sorted(row for each in ranks for row in each) == seen_by_spark(spark, table)
    assert [each.message for each in caplog.records if "data['train'] is read by Spark" in each.message]
