"""A quiet Spark inside this process, reachable from this machine only: what the examples run on."""

from __future__ import annotations

import os
from pathlib import Path

from pyspark.sql import SparkSession

LOG_SETTINGS = Path(__file__).with_name("log4j2.properties")
SHORT_LIVED = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xss4m"
"""For a JVM that lives for a minute and would spend much of it compiling. ALS has deep plans."""


def local_session(app_name: str, slots: int) -> SparkSession:
    """Start a local Spark with `slots` task slots: one rank needs one slot.

    On a cluster none of this is needed: take the session that the notebook or spark-submit gives you.
    """
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    return (
        SparkSession.builder.master(f"local[{slots}]")
        .appName(app_name)
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.extraJavaOptions", f'-Dlog4j2.configurationFile="{LOG_SETTINGS}" {SHORT_LIVED}')
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.shuffle.partitions", str(slots))
        .config("spark.sql.execution.arrow.pyspark.enabled", "true")
        # pandas' rows are data, not a part of each plan: comparing plans of 100,000 rows takes seconds
        .config("spark.sql.execution.arrow.localRelationThreshold", "0")
        .getOrCreate()
    )
