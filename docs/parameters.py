"""Writes the parameters of the estimators into their pages: ``python docs/parameters.py``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spark_hvd.estimators import TextClassifier, TorchEstimator

PAGES: Mapping[str, Any] = {"estimators.md": TorchEstimator._table, "transformers.md": TextClassifier._table}


def in_page(page: str, table: Sequence[Any]) -> str:
    """The text of a page with the table between its two marks."""
    before, _, rest = page.partition("<!-- parameters")
    mark, _, rest = rest.partition("-->\n")
    _, _, after = rest.partition("<!-- end of parameters -->")
    lines, group = [], None
    for row in table:
        if row.group != group:
            group = row.group
            lines += ["", f"**{group}**", "", "| parameter | default | meaning |", "|---|---|---|"]
        default = "" if row.default is None else f"`{row.default!r}`"
        lines.append(f"| `{row.name}` | {default} | {row.doc} |")
    table_text = "\n".join(lines).strip()
    return f"{before}<!-- parameters{mark}-->\n\n{table_text}\n\n<!-- end of parameters -->{after}"


if __name__ == "__main__":
    for name, table in PAGES.items():
        page = Path(__file__).parent / name
        page.write_text(in_page(page.read_text(), table))
