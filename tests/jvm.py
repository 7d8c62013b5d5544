"""The JVMs that tests start: their options, and an archive of the classes that Spark loads, which ``make`` writes once.

A JVM that lives for minutes spends most of its time compiling, and loading 15,000 classes. These options halve that:
the quick compiler only, with room for its code, one thread for garbage collection, and classes from the archive of an
earlier JVM (Java's class data sharing). A JVM of another Java or Spark, which the archive does not fit, starts as if
there were none.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ARCHIVE = Path(__file__).resolve().parents[1] / "build" / "spark.jsa"
_QUICK = "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=160m -XX:+UseSerialGC -Xlog:cds=off -Xlog:cds+dynamic=off"
SHORT_LIVED = f"{_QUICK} -XX:SharedArchiveFile={ARCHIVE}" if ARCHIVE.exists() else _QUICK
"""Options for a JVM that lives for minutes."""


def _each(batches: Iterator[Any]) -> Iterator[Any]:
    yield from batches


def make_archive() -> None:
    """Run what most tests do with Spark, in a JVM that writes the archive of its loaded classes when it ends."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    new = ARCHIVE.with_suffix(".new")
    from pyspark.sql import SparkSession

    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.driver.extraJavaOptions", f"{_QUICK} -XX:ArchiveClassesAtExit={new}")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.log.level", "OFF")
        .getOrCreate()
    )
    schema = "a int, b double, c string"
    with tempfile.TemporaryDirectory() as folder:
        rows = spark.createDataFrame([(i, float(i), str(i)) for i in range(100)], schema)
        rows.write.mode("overwrite").parquet(folder)
        stored = spark.read.parquet(folder).repartition(2)
        stored.groupBy("a").count().collect()
        stored.mapInArrow(_each, schema).collect()
        stored.toPandas()
        stored.rdd.barrier().mapPartitions(lambda rows: [len([*rows])]).collect()
    gateway: Any = spark.sparkContext._gateway
    spark.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()  # this ends the JVM
    gateway.proc.wait()
    new.replace(ARCHIVE)


if __name__ == "__main__":
    make_archive()
