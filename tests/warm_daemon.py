# ruff: noqa: F401
"""Spark's Python daemon with the modules that most workers import, so that a worker is forked in milliseconds."""

import gc
import importlib
import os

import pandas
import pyarrow.compute
import pyarrow.parquet
import pyspark.ml.functions
import pyspark.sql.pandas.functions
import pyspark.worker
import pytest
import torch
from pyspark.daemon import manager

import spark_hvd.estimators.data.writing
import spark_hvd.estimators.inference.function
import spark_hvd.estimators.transform.predict
import spark_hvd.runner.elastic.task
import spark_hvd.runner.supervise.incoming
import spark_hvd.runner.supervise.task

if __name__ == "__main__":
    for name in os.environ.get("SPARK_HVD_TESTS_LOADED", "").split():  # workers_with of tests/conftest.py sets it
        importlib.import_module(name)
    gc.freeze()  # a worker collects garbage after each task: 0.2 s if it goes through all of torch's objects
    manager()
