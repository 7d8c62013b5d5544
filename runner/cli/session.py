"""The Spark session of the command line: that of spark-submit, or a new one for the given master."""

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
    """Tell whether spark-submit started this program; if so, it has chosen the master."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


@contextmanager
def session(master: str | None, conf: Mapping[str, str], name: str) -> Iterator[SparkSession]:
    """Yield a session for one command, and stop it afterwards.

    If ``master`` is None, spark-submit or spark-defaults.conf names the master.

    Raises:
        ClusterError: Spark cannot be started or reached.
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
            "--conf spark.driver.host=<an address of this machine that executors can reach>."
        ) from error
    try:
        yield spark
    finally:
        with contextlib.suppress(Exception):
            spark.stop()


def ship(spark: SparkSession, files: list[str]) -> None:
    """Send Python files (.py, .zip, .egg) to the executors, and add them to their ``sys.path``."""
    for path in files:
        if is_connect(spark):  # do not test for the method: a classic session of 3.5 has it, and raises
            spark.addArtifacts(path, pyfile=True)
        else:
            spark.sparkContext.addPyFile(path)
