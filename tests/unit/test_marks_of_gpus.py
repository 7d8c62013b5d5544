"""Which tests need a GPU: those of tests/gpu, and not those whose folder's name begins like it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.gpu.conftest import pytest_collection_modifyitems

TESTS = Path(__file__).parents[1]


def test_simulated_devices_need_no_gpu() -> None:
    marks: dict[str, list[Any]] = {"gpu": [], "gpu_sim": []}
    items: Any = [SimpleNamespace(path=TESTS / name / "test_it.py", add_marker=marks[name].append) for name in marks]
    pytest_collection_modifyitems(items)
    assert "gpu" in [mark.name for mark in marks["gpu"]]
    assert marks["gpu_sim"] == []
