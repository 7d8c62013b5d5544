"""The notebook: what is committed was made by its code, tells nothing of a machine, and comes out the same again."""

from __future__ import annotations

import importlib.util
import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest

nbformat: Any = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "notebooks"
QUICKSTART = FOLDER / "quickstart.ipynb"
FAILS_ON_PURPOSE = "raises-exception"


def _executor() -> Any:
    spec = importlib.util.spec_from_file_location("execute_notebooks", FOLDER / "execute.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


executor = _executor()


def kinds(cell: Any) -> set[str]:
    """Of what a cell has put out: "stdout", "error", "image/png" ..."""
    found = set()
    for output in cell.outputs:
        found |= set(output.get("data", {})) or {output.get("name") or output.output_type}
    return found


@pytest.fixture(scope="module")
def committed() -> Any:
    return nbformat.read(QUICKSTART, as_version=4)


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_outputs_are_of_this_code(committed: Any) -> None:
    nbformat.validate(committed)
    assert committed.metadata["executed"] == executor.code_of(committed), "run examples/notebooks/execute.py"
    cells = code_cells(committed)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    shown = [kinds(cell) for cell in cells]
    assert sum("image/png" in each for each in shown) == 4
    assert sum("text/html" in each for each in shown) >= 5
    for cell, each in zip(cells, shown, strict=True):
        assert ("error" in each) == (FAILS_ON_PURPOSE in cell.metadata.get("tags", [])), cell.source


def test_the_last_frame_of_an_elastic_run_is_its_end(committed: Any) -> None:
    (table,) = (
        output.data["text/plain"]
        for cell in code_cells(committed)
        for output in cell.outputs
        if "train_elastic on" in output.get("data", {}).get("text/plain", "")
    )
    progress = re.findall(r"(\d+)/(\d+)", table)
    assert len(progress) == 4  # epoch and step of two ranks
    assert all(done == whole for done, whole in progress)


def test_it_is_small_and_tells_nothing_of_a_machine(committed: Any) -> None:
    assert QUICKSTART.stat().st_size < 400_000
    for cell in code_cells(committed):
        for output in cell.outputs:
            text = json.dumps({**output, "data": {**output.get("data", {}), "image/png": ""}})
            assert not re.search(r"(?<![\w.])/(home|root|tmp|usr|opt|work|var|Users)/", text), text
            assert "site-packages" not in text
            assert socket.gethostname() not in text
            assert not re.search(r"\b\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}\b", text.replace("127.0.0.1", "")), text


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_it_runs_and_shows_the_same_kinds_of_things(committed: Any) -> None:
    again = executor.execute(QUICKSTART)
    for before, after in zip(code_cells(committed), code_cells(again), strict=True):
        assert before.source == after.source
        assert kinds(before) - {"stderr"} == kinds(after) - {"stderr"}, after.source
    text = json.dumps([cell.outputs for cell in code_cells(again)])
    accuracies = re.findall(r"accuracy (0\.\d+)", text)
    assert len(accuracies) == 2
    assert min(map(float, accuracies)) > 0.9
