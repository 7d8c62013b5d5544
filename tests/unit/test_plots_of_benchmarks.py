"""The pictures of the benchmarks are drawn from their pages, and those pages show them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.later import Later

plots: Any = Later("benchmarks.plots")
DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_pictures() -> None:
    pages = "".join(page.read_text() for page in DOCS.glob("*.md"))
    assert len(plots.PICTURES) > 1
    for name, drawn in plots.PICTURES.items():
        assert len([line for axes in drawn().axes for line in axes.lines]) >= 6, name
        picture = DOCS / "images" / f"{name}.png"
        assert picture.read_bytes()[:4] == b"\x89PNG", name
        assert picture.stat().st_size < 120 * 1024, name
        assert f"](images/{name}.png)" in pages, name


def test_figures_are_those_of_the_tables() -> None:
    latency, bandwidth = plots.allreduce().axes
    page = (DOCS / "benchmarks.md").read_text()
    first = re.search(r"^\| 67,108,864 \| ([\d,]+) \|", page, re.MULTILINE)
    assert first is not None
    us = float(first[1].replace(",", ""))
    assert latency.lines[0].get_ydata()[-1] == us
    assert bandwidth.lines[0].get_ydata()[-1] == pytest.approx(67_108_864 / us / 1000)
    predicted = plots.scaling().axes[1]
    # as in the page's table for ResNet-101 and 25 Gbit/s at 512 ranks: TCP, TCP in two levels, RDMA, both
    assert [round(line.get_ydata()[2]) for line in predicted.lines[:4]] == [22, 64, 99, 100]


def test_figures_at_a_glance_are_those_of_the_sections() -> None:
    page = (DOCS / "benchmarks.md").read_text()
    _, _, below = page.partition("\n## One GPU\n")
    parts = re.split(r"\n##+ (.+)\n", below)
    names = [re.sub(r"[^a-z0-9]+", "-", name.lower()) for name in parts[1::2]]
    section_of = dict(zip(names, parts[2::2], strict=True))
    rows = plots.table(DOCS / "benchmarks.md", "At a glance", "spark_hvd").rows
    assert len(rows) == 10
    for row in rows:
        text = section_of[row[-1].partition("(#")[2].rstrip(")")]
        assert all(re.search(rf"(?<![\d.,]){re.escape(cell)}(?![\d.,]*\d)", text) for cell in row[2:5] if cell), row


def test_a_table_that_is_not_there(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A\n\n## B\n\n| x | y |\n|---|---|\n| 1,000 | 5 % |\n\nText.\n\n## C\n")
    assert plots.table(page, "B", "y").numbers("x") == [1000]
    for heading, column in (("B", "z"), ("C", "y"), ("D", "y")):
        with pytest.raises(ValueError, match=f"page.md: no table with a column '{column}' below '{heading}'"):
            plots.table(page, heading, column)
