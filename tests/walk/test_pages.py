"""The documentation's Python runs: all blocks of a page, in order, as one program; a block that cannot run says why.

Above each block is ``<!-- runnable -->`` or ``<!-- not run: the reason -->``. Lines that a page needs and that its
readers do not are in a separate comment, ``<!-- before it:`` to ``-->``, and run at that place.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.walk.stranger import ROOT, typed

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(
    r"^<!-- before it:\n(?P<unseen>.*?)^-->$"
    r"|^(?:(?P<marker><!-- [^\n]* -->)\n)?```python[^\n]*\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
RUNNABLE = "<!-- runnable -->"
REASON = re.compile(r"<!-- not run: \w.{5,} -->")


def blocks(page: Path) -> list[re.Match[str]]:
    return list(BLOCK.finditer(page.read_text()))


def program(page: Path) -> str:
    """The lines that run, each at the line that it has on the page, so that tracebacks point there."""
    text, lines = page.read_text(), [""] * page.read_text().count("\n")
    for block in BLOCK.finditer(text):
        if block["unseen"] or block["marker"] == RUNNABLE:
            part = "unseen" if block["unseen"] else "code"
            first = text.count("\n", 0, block.start(part))
            lines[first : first + block[part].count("\n")] = block[part].splitlines()
    return "\n".join(lines).rstrip()


PROGRAMS = {page.stem: code for page in PAGES if (code := program(page))}
# Pages with Horovod's words come last: their process has Horovod's dialect from then on.
TOGETHER = [
    "data", "estimators", "migrating-from-torchdistributor", "run-data", "README", "index", "networks", "run",
    "quickstart", "tracking", "doctor", "elastic", "embeddings", "image-classifier", "local-sgd", "predict",
    "transformers", "tutorial", "checkpoints", "collectives", "ddp", "progress", "timeline", "tuning",
    "migrating-from-horovodrunner", "migrating-from-horovod",
]  # fmt: skip
"""Pages that run one after another in a process: most of their time would be the start of Spark and of torch."""
RUNS = [TOGETHER, *([page] for page in PROGRAMS if page not in TOGETHER)]


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
@pytest.mark.timeout(900)
@pytest.mark.parametrize("pages", RUNS, ids=" ".join)
def test_pages_run(pages: list[str], tmp_path: Path) -> None:
    scripts = [tmp_path / "pages" / f"{page}.py" for page in pages]  # not where modules of these names would be found
    scripts[0].parent.mkdir()
    for script in scripts:
        script.write_text(PROGRAMS[script.stem])
    each = "import runpy, sys; [runpy.run_path(page, run_name='__main__') for page in sys.argv[1:]]"
    typed(tmp_path, "-c", each, *map(str, scripts), timeout=880)
