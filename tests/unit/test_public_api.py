"""The public names are a decision, and importing them is cheap: no pyspark in a rank, one module object per file."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import spark_hvd

ROOT = Path(__file__).resolve().parents[2]


def modules_after(statement: str) -> dict[str, str]:
    """Return names and files of the modules that a fresh interpreter has loaded after `statement`."""
    program = (
        f"{statement}\nimport json, os, sys\n"
        "files = {name: getattr(module, '__file__', None) for name, module in sys.modules.items()}\n"
        "print(json.dumps({name: os.path.realpath(file) for name, file in files.items() if file}))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True)
    loaded: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return loaded


def test_public_names() -> None:
    assert sorted(spark_hvd.__all__) == [
        "CollectiveError",
        "DataError",
        "DuplicateNameError",
        "HostsUpdatedInterrupt",
        "MismatchError",
        "Network",
        "NotInitializedError",
        "PlanMismatchError",
        "Reporting",
        "StalledError",
        "__version__",
        "doctor",
        "predict",
        "run",
        "run_elastic",
        "run_elastic_local",
        "run_local",
        "warm_up",
    ]
    assert all(hasattr(spark_hvd, name) for name in spark_hvd.__all__)


@pytest.mark.parametrize("name", ["spark_hvd", "spark_hvd.compat", "spark_hvd.data", "spark_hvd.estimators"])
def test_dir_gives_the_public_names(name: str) -> None:
    module = importlib.import_module(name)
    assert dir(module) == sorted(module.__all__)


def test_imports_load_no_spark() -> None:
    statement = (
        "import spark_hvd, spark_hvd.torch, spark_hvd.runner.rank.main, spark_hvd.estimators; spark_hvd.run_local"
    )
    assert "pyspark" not in modules_after(statement)


def test_bare_import_loads_no_torch() -> None:
    assert "torch" not in modules_after("import spark_hvd, spark_hvd.runner")


def test_every_file_is_one_module() -> None:
    ours = [path for path in modules_after("import spark_hvd; spark_hvd.run").values() if path.startswith(str(ROOT))]
    assert str(ROOT / "runner" / "launch" / "run.py") in ours
    assert len(ours) == len(set(ours))


def test_without_jax_its_face_says_what_to_install() -> None:
    program = "import sys; sys.modules['jax'] = None; import spark_hvd.jax"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert "spark_hvd.jax needs JAX, in the Python of each rank: pip install 'jax>=0.10'" in done.stderr
