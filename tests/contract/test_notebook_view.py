"""The view of a run in a real notebook: drawn in place while the cell runs, and kept in the file."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]

CELL = r"""
import sys
from spark_hvd.runner.watch.display.choose import make_display
from spark_hvd.runner.watch.view import RunView
from spark_hvd.world.vitals import Vitals

display, view = make_display("auto", 1, None, None), RunView("train on 2 ranks", 2, 0.0)
for second in range(1, 41):
    for rank in range(2):
        view.take(Vitals(rank=rank, size=2, generation=0, clock=float(second), stage="train", step=second, steps=50,
                         total_steps=second, samples=32 * second, data_seconds=0.1 * second,
                         comm_seconds=0.2 * second, metrics={"<loss>": 1 / second}), float(second))
    display.show(view, float(second))
    display.lines(second % 2, "out", f"line {second}")
display.lines(0, "err", "a warning")
display.end(view.summary(41.0))
"""


def test_one_table_in_the_cell_and_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    NotebookClient(notebook, timeout=50, kernel_name="python3", coalesce_streams=True).execute()
    outputs = notebook.cells[0].outputs
    assert [output.output_type for output in outputs] == ["display_data", "stream", "stream"]
    drawn, out, err = outputs
    assert "40/50" in drawn.data["text/html"]
    assert "<b>train on 2 ranks</b>" in drawn.data["text/html"]  # from the summary
    assert "&lt;loss&gt;" in drawn.data["text/html"]
    assert "40/50" in drawn.data["text/plain"]
    assert "<div>" not in drawn.data["text/plain"]
    assert out.text == "".join(f"[{second % 2}] line {second}\n" for second in range(1, 41))
    assert err.text == "[0] a warning\n"
