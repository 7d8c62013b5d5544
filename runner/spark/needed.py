"""The errors for a missing PySpark, and for one that is too old."""

from __future__ import annotations

import sys

OLDEST = (3, 5)


def check_pyspark() -> None:
    """Check that PySpark can be imported and is new enough.

    Raises:
        ImportError: It cannot be imported, or is older than 3.5. The message has the line to type on each platform.
    """
    try:
        import pyspark
    except ImportError as error:
        raise ImportError(
            f"{sys.executable} cannot import PySpark ({error}). spark_hvd does not install it, so that it never "
            "replaces the one of a cluster. On a laptop: pip install 'pyspark>=3.5'. For a Spark Connect server: "
            "pip install pyspark-client. For Databricks from elsewhere: pip install databricks-connect 'pyarrow<26' "
            "'pandas<3'. On a cluster of Databricks, EMR or Dataproc: run this in a notebook or with spark-submit, "
            "whose Python has PySpark"
        ) from error
    if tuple(int(part) for part in pyspark.__version__.split(".")[:2]) < OLDEST:
        raise ImportError(
            f"PySpark {pyspark.__version__} ({pyspark.__file__}) is too old: expected 3.5 or newer. Use a newer "
            "cluster or, on a laptop, pip install 'pyspark>=3.5'"
        )
