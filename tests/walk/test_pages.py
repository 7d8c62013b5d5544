"""The documentation's Python runs: all blocks of a page, in order, as one program; a block that cannot run says why.

Above each block is ``<!-- runnable -->`` or ``<!-- not run: the reason -->``. Lines that a page needs and that its
readers do not are in a separate comment, ``<!-- before it:`` to ``-->``, and run at that place.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from tests.walk.pages import ALONE, PAGES, PROGRAMS, RUNNABLE, blocks
from tests.walk.stranger import typed

REASON = re.compile(r"<!-- not run: \w.{5,} -->")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_block_runs_or_says_why_not(page: Path) -> None:
    found = [block for block in blocks(page) if not block["unseen"]]
    assert page.read_text().count(RUNNABLE) == sum(block["marker"] == RUNNABLE for block in found)
    for block in found:
        marker = block["marker"] or ""
        assert marker == RUNNABLE or REASON.fullmatch(marker), f"{marker!r} above:\n{block['code']}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_block_is_python_that_fits_the_page(page: Path) -> None:
    for block in blocks(page):
        ast.parse(block["unseen"] or block["code"])
        wide = [line for line in (block["code"] or "").splitlines() if len(line) > 100]
        assert wide == []  # the site shows this many columns on a laptop's screen


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", sorted(PROGRAMS.keys() - {*ALONE}))
def test_a_page_runs(told: dict[str, dict[str, Any]], page: str) -> None:
    assert told[page]["message"] is None, told[page]["said"]


@pytest.mark.slow
@pytest.mark.parametrize("page", ALONE)
def test_a_page_of_a_rank_runs(page: str, tmp_path: Path) -> None:
    script = tmp_path / "pages" / f"{page}.py"  # not where a module of this name would be found
    script.parent.mkdir()
    script.write_text(PROGRAMS[page])
    typed(tmp_path, str(script), timeout=280)
