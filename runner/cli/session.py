"""Where the command line gets its Spark session from: spark-submit, a master that was named, or none."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from spark_hvd.runner.outcome.errors import ClusterError
from spark_hvd.runner.spark.needed import check_pyspark
from spark_hvd.runner.spark.session import is_connect

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def is_submitted() -> bool:
    """Whether spark-submit started this program: it has chosen the master then, and waits for a session."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


@contextmanager
def session(master: str | None, conf: Mapping[str, str], name: str) -> Iterator[SparkSession]:
    """A session for one command, stopped after it. Without a master, that of spark-submit or spark-defaults.conf.

    Raises:
        ClusterError: Spark cannot be started, or not reached.
    """
    try:
        check_pyspark()
    except ImportError as error:
        raise ClusterError(str(error)) from error
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName(name).config("spark.ui.showConsoleProgress", "false")
    if master is not None:
        builder = builder.remote(master) if master.startswith("sc://") else builder.master(master)
    for key, value in conf.items():
        builder = builder.config(key, value)
    try:
        spark = builder.getOrCreate()
    except Exception as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        where = "" if master is None else f" at {master}"
        raise ClusterError(
            f"no Spark session{where}: {first}. Check the address of the master, Java (spark-hvd check-build), and "
            "--conf spark.driver.host=<an address of this machine that executors reach>."
        ) from error
    try:
        yield spark
    finally:
        with contextlib.suppress(Exception):
            spark.stop()


def ship(spark: SparkSession, files: list[str]) -> None:
    """Send Python files (.py, .zip, .egg) to the executors, onto their ``sys.path``."""
    for path in files:
        if is_connect(spark):  # a classic session of 3.5 has the method, too, and raises
            spark.addArtifacts(path, pyfile=True)
        else:
            spark.sparkContext.addPyFile(path)
