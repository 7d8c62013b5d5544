"""The Python of the documentation's pages: the blocks of each, and the program that those make which run."""

from __future__ import annotations

import re
from pathlib import Path

from tests.walk.stranger import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(
    r"^<!-- before it:\n(?P<unseen>.*?)^-->$"
    r"|^(?:(?P<marker><!-- [^\n]* -->)\n)?```python[^\n]*\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
RUNNABLE = "<!-- runnable -->"


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
ALONE = ("optimizer", "mpi", "command-line")
"""Pages whose program is a rank. Each has a process of its own."""
LAST = ("migrating-from-horovodrunner", "migrating-from-horovod")
"""Pages with Horovod's words: their process has Horovod's dialect from then on."""
