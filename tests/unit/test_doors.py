"""Every name in docs/api is where the page says, and its class is known by that path: in tracebacks, in pickles."""

from __future__ import annotations

import importlib
import pickle
import pkgutil
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

DOORS = (
    "spark_hvd",
    "spark_hvd.checkpoint",
    "spark_hvd.estimators",
    "spark_hvd.jax",
    "spark_hvd.keras",
    "spark_hvd.keras.callbacks",
    "spark_hvd.keras.elastic",
    "spark_hvd.mxnet",
    "spark_hvd.runner",
    "spark_hvd.store",
    "spark_hvd.tensorflow",
    "spark_hvd.tensorflow.elastic",
    "spark_hvd.testing",
    "spark_hvd.torch",
    "spark_hvd.torch.elastic",
)
PAGES = "".join(page.read_text() for page in sorted((Path(__file__).parents[2] / "docs" / "api").glob("*.md")))
LISTED = sorted(set(re.findall(r"^::: ([\w.]+)$", PAGES, flags=re.MULTILINE)))
HEAVY = tuple(f"spark_hvd.{name}" for name in ("jax", "keras", "mxnet", "tensorflow"))
"""Doors that load another framework, which takes seconds."""
SHARED = {
    "Compression",
    "Compressor",
    "Config",
    "NamedHandle",
    "ObjectState",
    "ProcessSet",
    "Progress",
    "ReduceOp",
    "State",
}
"""Classes that every framework's API re-exports, and none owns."""


def opened(door: str) -> Any:
    if door.startswith(HEAVY):
        pytest.importorskip(door.split(".")[1])
    return importlib.import_module(door)


def listed(path: str) -> Any:
    if path.startswith("spark_hvd.estimators.Lightning"):
        pytest.importorskip("lightning")
    door, _, name = path.rpartition(".")
    return getattr(opened(door), name)


def each(paths: Iterable[str]) -> list[Any]:
    heavy = (*HEAVY, "spark_hvd.estimators.Lightning")
    return [pytest.param(path, marks=pytest.mark.slow) if path.startswith(heavy) else path for path in paths]


@pytest.mark.parametrize("path", each(LISTED))
def test_a_class_is_called_by_a_path_of_its_door(path: str) -> None:
    found = listed(path)
    if not isinstance(found, type) or found.__name__ in SHARED:
        return
    assert found.__module__ in (*DOORS, path.rpartition(".")[0])
    assert getattr(importlib.import_module(found.__module__), found.__name__) is found
    assert pickle.loads(pickle.dumps(found)) is found


@pytest.mark.parametrize("door", each(DOORS))
def test_no_module_stands_where_a_name_is_public(door: str) -> None:
    """Importing a submodule binds its name in the package, over whatever is there."""
    module = opened(door)
    inside = {found.name for found in pkgutil.iter_modules(getattr(module, "__path__", []))}
    public = {path.removeprefix(f"{door}.") for path in LISTED if path.startswith(f"{door}.")}
    faces = {
        "spark_hvd.torch": {"elastic"},
        "spark_hvd.keras": {"callbacks", "elastic"},
        "spark_hvd.tensorflow": {"elastic"},
    }
    face = faces.get(door, set())
    assert inside & (public | set(getattr(module, "__all__", []))) == face
