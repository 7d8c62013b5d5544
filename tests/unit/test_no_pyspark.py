"""If PySpark is missing or too old, each entry point says what to install; what needs no Spark works."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from spark_hvd.runner.spark.needed import check_pyspark

WITHOUT = """
import sys
sys.modules["pyspark"] = None
import spark_hvd, spark_hvd.estimators
from click.testing import CliRunner
from spark_hvd.runner.cli import main

doors = {
    "run": lambda: spark_hvd.run(print, num_proc=1),
    "run_elastic": lambda: spark_hvd.run_elastic(print, num_proc=1),
    "doctor": lambda: spark_hvd.doctor(),
    "predict": lambda: spark_hvd.predict,
    "TorchEstimator": lambda: spark_hvd.estimators.TorchEstimator,
}
for name, door in doors.items():
    try:
        door()
    except ImportError as error:
        assert "pip install 'pyspark>=3.5'" in str(error), error
        assert sys.executable in str(error)
    else:
        raise AssertionError(name)
done = CliRunner().invoke(main, ["doctor", "--master", "local[1]"])
assert done.exit_code != 0 and "pip install 'pyspark>=3.5'" in done.output, done.output
print(spark_hvd.estimators.Store.__name__)
if "run_local" in sys.argv:
    print(spark_hvd.run_local(int, num_proc=1))
"""


@pytest.mark.parametrize("more", [(), pytest.param(("run_local",), marks=pytest.mark.slow)])
def test_no_pyspark_at_all(more: tuple[str, ...]) -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT, *more], capture_output=True, text=True, timeout=110)
    assert done.stdout.splitlines()[-1:] == ["[0]" if more else "Store"], done.stderr


def test_one_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyspark", SimpleNamespace(__version__="3.4.4", __file__="/old/pyspark.py"))
    with pytest.raises(ImportError, match=r"PySpark 3.4.4 \(/old/pyspark.py\) is too old: expected 3.5 or newer"):
        check_pyspark()
    monkeypatch.setitem(sys.modules, "pyspark", SimpleNamespace(__version__="4.1.0.dev2", __file__="/new/pyspark.py"))
    check_pyspark()
