"""The notebooks: their committed output was produced by their code, reveals no machine, and can be reproduced."""

from __future__ import annotations

import importlib.util
import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.walk.stranger import configure

nbformat: Any = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "notebooks"
NOTEBOOKS = sorted(path.name for path in FOLDER.glob("*.ipynb"))
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
    """Return the kinds of a cell's outputs: "stdout", "error", "image/png" ..."""
    found = set()
    for output in cell.outputs:
        found |= set(output.get("data", {})) or {output.get("name") or output.output_type}
    return found


def committed(name: str) -> Any:
    return nbformat.read(FOLDER / name, as_version=4)


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_outputs_are_of_this_code(name: str) -> None:
    notebook = committed(name)
    nbformat.validate(notebook)
    assert notebook.metadata["executed"] == executor.code_of(notebook), "run examples/notebooks/execute.py"
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    shown = [kinds(cell) for cell in cells]
    assert sum("image/png" in each for each in shown) >= 1
    for cell, each in zip(cells, shown, strict=True):
        assert ("error" in each) == (FAILS_ON_PURPOSE in cell.metadata.get("tags", [])), cell.source


def test_the_last_frame_of_an_elastic_run_is_its_end() -> None:
    (table,) = (
        output.data["text/plain"]
        for cell in code_cells(committed("quickstart.ipynb"))
        for output in cell.outputs
        if "train_elastic on" in output.get("data", {}).get("text/plain", "")
    )
    progress = re.findall(r"(\d+)/(\d+)", table)
    assert len(progress) == 4  # epoch and step of two ranks
    assert all(done == whole for done, whole in progress)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_it_is_small_and_tells_nothing_of_a_machine(name: str) -> None:
    assert (FOLDER / name).stat().st_size < 400_000
    for cell in code_cells(committed(name)):
        for output in cell.outputs:
            text = json.dumps({**output, "data": {**output.get("data", {}), "image/png": ""}})
            assert not re.search(r"(?<![\w.])/(home|root|tmp|usr|opt|work|var|Users)/", text), text
            assert "site-packages" not in text
            assert socket.gethostname() not in text
            assert not re.search(r"\b\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}\b", text.replace("127.0.0.1", "")), text


def of_runs(notebook: Any) -> Any:
    """Return the notebook up to its first failure, plus its last cell, which ends Spark."""
    fails = [FAILS_ON_PURPOSE in cell.metadata.get("tags", []) for cell in notebook.cells]
    notebook.cells[fails.index(True) + 1 : -1] = []
    return notebook


@pytest.mark.timeout(420)
@pytest.mark.parametrize(
    ("name", "whole"),
    # By day the runs of one. Its estimator and its elastic run are those of docs/tutorial.md, and programs do the same
    # as the other notebooks, on fewer rows.
    [
        pytest.param("quickstart.ipynb", False, marks=pytest.mark.slow),
        *(pytest.param(name, True, marks=pytest.mark.night) for name in NOTEBOOKS),
    ],
)
def test_it_runs_and_shows_the_same_kinds_of_things(
    name: str, whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(tmp_path)
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    before = committed(name) if whole else of_runs(committed(name))
    nbformat.write(before, tmp_path / name)
    again = executor.execute(tmp_path / name)
    for old, new in zip(code_cells(before), code_cells(again), strict=True):
        assert old.source == new.source
        assert kinds(old) - {"stderr"} == kinds(new) - {"stderr"}, new.source
    text = "".join(output.get("text", "") for cell in code_cells(again) for output in cell.outputs)
    assert all(float(accuracy) > 0.9 for accuracy in re.findall(r"^accuracy (0\.\d+)", text, re.M)), text
