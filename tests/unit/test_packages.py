"""What packages say of themselves: the recipe for conda is that of pyproject.toml, and both say what is true."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import spark_hvd

ROOT = Path(__file__).resolve().parents[2]
CONDA_NAMES = {"torch": "pytorch"}


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    found: dict[str, Any] = pytest.importorskip("tomllib").loads((ROOT / "pyproject.toml").read_text())
    return found


def wanted(requirement: str) -> tuple[str, str]:
    """The name that conda has for a package, and the versions."""
    name, versions = re.fullmatch(r"([\w-]+)(?:\[[\w,-]+\])?\s*([^;]*)(?:;.*)?", requirement).groups()  # type: ignore[union-attr]
    return CONDA_NAMES.get(name, name), versions.strip()


def test_the_recipe_for_conda_is_that_of_pyproject(project: dict[str, Any]) -> None:
    yaml = pytest.importorskip("yaml")
    recipe = yaml.safe_load((ROOT / "conda" / "meta.yaml").read_text())
    told = project["project"]
    assert recipe["package"] == {"name": told["name"], "version": spark_hvd.__version__}
    python = ("python", told["requires-python"])
    run = [wanted(each) for each in recipe["requirements"]["run"]]
    assert run == [("__linux", ""), python, *map(wanted, told["dependencies"])]
    host = [wanted(each) for each in recipe["requirements"]["host"]]
    assert host == [python, ("pip", ""), *map(wanted, project["build-system"]["requires"])]
    extras = {wanted(each) for extra in told["optional-dependencies"].values() for each in extra}
    constrained = [wanted(each) for each in recipe["requirements"]["run_constrained"]]
    assert {name for name, _ in constrained} >= {"pyspark", "pytorch"}
    assert [each for each in constrained if each not in extras] == []
    assert recipe["build"]["entry_points"] == [f"{name} = {what}" for name, what in told["scripts"].items()]
    assert (recipe["about"]["summary"], recipe["about"]["license"]) == (told["description"], told["license"])
    assert (ROOT / recipe["about"]["license_file"]).is_file()


def test_classifiers_name_the_versions_that_the_matrix_has(project: dict[str, Any]) -> None:
    prefix = "Programming Language :: Python :: 3."
    named = {each.removeprefix(prefix) for each in project["project"]["classifiers"] if each.startswith(prefix)}
    page = (ROOT / "docs" / "versions.md").read_text()
    ran = set(re.findall(r"^\|[^|]*\| 3\.(\d+)\.\d+ \|", page, re.MULTILINE))
    assert named == ran, "Python's versions of the classifiers, and of the rows that ran in docs/versions.md"
