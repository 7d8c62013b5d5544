"""Tests with databricks-connect, which has its own `pyspark`: pip replaces nothing; the first call says what to do.

tests/matrix.py runs this in an environment without PyPI's PySpark. No Databricks cluster is used.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, files, version
from pathlib import Path

import pyspark
import pytest

import spark_hvd
from spark_hvd.runner import ClusterError


def test_its_pyspark_is_the_only_one_and_pip_finds_no_conflict() -> None:
    owned = {Path(str(each.locate())).resolve() for each in files("databricks-connect") or ()}
    assert Path(pyspark.__file__).resolve() in owned
    for name in ("pyspark", "pyspark-client"):
        with pytest.raises(PackageNotFoundError):
            version(name)
    done = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "No broken requirements found.\n"), done.stderr


def test_the_first_call_without_a_session_says_what_to_do() -> None:
    for call in (
        lambda: spark_hvd.run(print, num_proc=1),
        lambda: spark_hvd.run_elastic(print, num_proc=1),
        lambda: spark_hvd.doctor(),
    ):
        with pytest.raises(ClusterError, match=r"there is no active Spark session\. Create one first"):
            call()


def test_without_spark_it_works() -> None:
    pytest.importorskip("torch")
    assert spark_hvd.run_local(int, num_proc=2, verbose=0) == [0, 0]


def test_estimators_are_imported() -> None:
    pytest.importorskip("torch")
    from spark_hvd.estimators import TorchEstimator, TorchModel

    assert TorchEstimator.__module__.startswith("spark_hvd.")
    assert TorchModel.__module__.startswith("spark_hvd.")
