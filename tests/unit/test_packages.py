"""What packages declare, and the install commands on pages and in messages: all correct."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

import spark_hvd

ROOT = Path(__file__).resolve().parents[2]
CONDA_NAMES = {"torch": "pytorch"}


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    found: dict[str, Any] = pytest.importorskip("tomllib").loads((ROOT / "pyproject.toml").read_text())
    return found


def wanted(requirement: str) -> tuple[str, str]:
    """Return conda's name for a package, and the versions."""
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


# -- lines of pip

OPTION = r"--no-deps|--no-cache-dir|--index-url \S+|-e"
BARE = r"(?:\.(?![\w/])|[\w{/.](?:[\w.{}/=*-]*[\w}/*])?)(?:\[[\w,]*\]|[<>]\S+)?"  # without a sentence's full stop
TOKEN = rf"""(?:'[^'\n]+'|"[^"\n]+"|{OPTION}|{BARE})"""
LINE = re.compile(rf"pip install ({TOKEN}(?: {TOKEN})*)")
OTHERS = {"databricks-connect", "mxnet", "venv-pack"}
"""Packages that lines name and pyproject.toml does not."""


def texts() -> Iterator[tuple[str, str]]:
    """Return what users read, by path: the joined strings of Python files, the lines of notebooks' cells."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    examples = [each for each in (ROOT / "examples").rglob("*") if each.suffix in (".py", ".md", ".ipynb")]
    ours = [each for folder in ("spark_hvd", "runner", "estimators") for each in (ROOT / folder).rglob("*.py")]
    for path in sorted({each.resolve() for each in (*pages, *examples, *ours) if ".venv" not in each.parts}):
        text = path.read_text().replace('\\"', '"').replace("\\n", "\n")
        yield str(path.relative_to(ROOT)), re.sub(r'\\\n *|(?<=\w )"\n +f?"', "", text)


def lines_of_pip() -> list[tuple[str, list[str]]]:
    """Return the arguments after ``pip install``, by the path of the text."""
    return [(path, re.findall(TOKEN, line)) for path, text in texts() for line in LINE.findall(text)]


def fault(token: str, project: dict[str, Any]) -> str | None:
    """Return why the arguments after ``pip install`` do not install what they name; None if they do."""
    if token.startswith("-") or "{" in token:  # an option, or filled in by a line that another test covers
        return None
    bare = token.strip("'\"")
    if bare == token and re.search(r"[][<>*]", token):
        return "a shell reads this otherwise without quotes"
    told = project["project"]
    if bare.startswith((".", "/")) or ".whl" in bare:
        where, _, extras = bare.rstrip("]").partition("[")
        wheel = f"spark_hvd-{spark_hvd.__version__}-py3-none-any.whl"
        if not (where.endswith(wheel) if where.endswith(".whl") else (ROOT / where).is_dir()):
            return "no such folder, or a wheel of another version"
        unknown = set(filter(None, extras.split(","))) - told["optional-dependencies"].keys()
        return f"no such extras: {unknown}" if unknown else None
    asked = Requirement(bare)
    if asked.name == told["name"]:
        return "no index has it"
    known = [Requirement(each) for group in told["optional-dependencies"].values() for each in group]
    bounds = [each for each in (*known, *map(Requirement, told["dependencies"])) if each.name == asked.name]
    if not bounds and asked.name not in OTHERS:
        return "a package that pyproject.toml does not name"
    upper = {str(one) for each in bounds if each.name == "petastorm" for one in each.specifier if one.operator == "<"}
    return f"pip takes a version that is not {upper}" if upper - {str(one) for one in asked.specifier} else None


def test_lines_of_pip_can_be_typed_as_they_are(project: dict[str, Any]) -> None:
    """In a clone, from a wheel, or from an index: with existing extras and versions, and quoted for a shell."""
    lines = lines_of_pip()
    assert len(lines) > 60
    faults = [(path, each, why) for path, tokens in lines for each in tokens if (why := fault(each, project))]
    assert faults == []


def test_what_is_wrong_with_a_line_is_noticed(project: dict[str, Any]) -> None:
    for token in ("spark_hvd", "'spark_hvd[spark]'", ".[torch]", '".[tensor]"', "petastorm", "no-such-package"):
        assert fault(token, project), token
    for token in (".", '".[torch,spark]"', "'petastorm<0.13'", "keras", "--no-deps", "./examples/horovod_package"):
        assert fault(token, project) is None, token


def test_what_setup_finds_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = runpy.run_path(str(ROOT / ".ci" / "missing"))["missing"]
    found = missing.__globals__["distribution"]

    def without_cloudpickle(name: str) -> Any:
        return found("no-such-package" if name == "cloudpickle" else name)

    assert missing("torch", "") == []
    lines = missing("torch", "numpy==0.1")
    assert lines
    assert all(re.fullmatch(r"numpy.*: \S+ is installed", line) for line in lines), lines
    monkeypatch.setitem(missing.__globals__, "distribution", without_cloudpickle)
    assert any(line.startswith("cloudpickle") and line.endswith(": not installed") for line in missing("torch", ""))
