"""The wheel contains the three packages under one name, works without the checkout, and adds nothing else."""

from __future__ import annotations

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

CHECK = """
import spark_hvd, spark_hvd.runner, spark_hvd.estimators, importlib.metadata, importlib.util
for module in (spark_hvd, spark_hvd.runner, spark_hvd.estimators):
    print(module.__file__)
assert importlib.metadata.version("spark_hvd") == spark_hvd.__version__
assert importlib.util.find_spec("runner") is None
assert importlib.util.find_spec("estimators") is None
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Through an sdist, like a release: what the sdist lacks is then missing here, too.
    target = tmp_path_factory.mktemp("dist")
    # With the installed setuptools: a separate environment would take longer than the rest.
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", target, ROOT]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (built,) = target.glob("*.whl")
    return built


def sources() -> set[str]:
    """Return git's modules, as a wheel names them."""
    listed = ["git", "-C", str(ROOT), "ls-files", "spark_hvd/*.py", "runner/*.py", "estimators/*.py"]
    paths = subprocess.run(listed, check=True, capture_output=True, text=True).stdout.split()
    return {path if path.startswith("spark_hvd/") else f"spark_hvd/{path}" for path in paths}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_wheel_holds_our_packages_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"spark_hvd"}
    assert {"spark_hvd/__init__.py", "spark_hvd/runner/__init__.py", "spark_hvd/estimators/__init__.py"} <= sources()
    assert {name for name in names if name.endswith(".py")} == sources()
    assert {"spark_hvd/py.typed", "spark_hvd/runner/watch/display/page.html"} <= {*names}
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_wheel_works_in_a_clean_environment(wheel: Path, tmp_path: Path) -> None:
    clean = tmp_path / "venv"
    venv.create(clean)
    python = clean / "bin" / "python"
    install = ["install", "--quiet", "--no-deps", "--no-index", "--no-compile"]
    subprocess.run([sys.executable, "-m", "pip", "--python", python, *install, wheel], check=True)
    # -I and another folder: neither PYTHONPATH nor the checkout may help.
    found = subprocess.run([python, "-I", "-c", CHECK], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert all(Path(line).is_relative_to(clean) for line in found.stdout.splitlines())
    assert len(found.stdout.splitlines()) == 3
