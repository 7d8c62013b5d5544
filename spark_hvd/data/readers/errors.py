"""What is wrong with data, wherever it is found: on a driver, in a Spark task, in a rank."""

from __future__ import annotations


class DataError(RuntimeError, ValueError):
    """The data do not fit the parameters: a column missing or of a wrong type, nulls, ragged arrays, too few rows."""

    __module__ = "spark_hvd"
