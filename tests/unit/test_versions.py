"""The floors in pyproject.toml are those that the lowest row of the matrix runs, and that README names."""

from __future__ import annotations

import re
from pathlib import Path

from tests import matrix

ROOT = Path(__file__).parents[2]
NAMES = {"PyTorch": "torch", "Spark": "pyspark", "pyarrow": "pyarrow", "pandas": "pandas", "Lightning": "lightning"}


def padded(version: str) -> str:
    return ".".join([*version.split("."), "0", "0"][:3])


def floors() -> dict[str, str]:
    text = (ROOT / "pyproject.toml").read_text()
    needed = re.search(r"^dependencies = \[(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    extras = re.findall(r"^(?:spark|torch|lightning|mpi|s3) = (\[.*\])$", text, re.MULTILINE)
    assert needed is not None
    return dict(re.findall(r'"([\w-]+)>=([\d.]+)', "".join([needed[1], *extras])))


def test_the_lowest_row_has_every_floor() -> None:
    pins = dict(pin.split("==") for pin in matrix.rows()["lowest"].pins)
    assert {name: padded(version) for name, version in floors().items()} == pins


def test_readme_names_the_floors() -> None:
    told = dict(re.findall(r"^\| (\w+) \| (\d[\d.]*) and newer", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert {NAMES[name]: version for name, version in told.items()} == {
        name: version for name, version in floors().items() if name in NAMES.values()
    }


def test_every_dependency_has_a_floor() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    needed = re.search(r"^dependencies = \[(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    assert needed is not None
    assert [line for line in re.findall(r'"([^"]+)"', needed[1]) if ">=" not in line] == []
