"""The runnable Python blocks of the documentation run: all blocks of a page, in order, as one program."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^<!-- runnable -->\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)

PAGES = {
    str(page.relative_to(ROOT)): "\n".join(blocks)
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    if (blocks := BLOCK.findall(page.read_text()))
}


def test_every_marker_has_its_block() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        text = page.read_text()
        assert text.count("<!-- runnable -->") == len(BLOCK.findall(text)), page.name


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("page", PAGES)
def test_page_runs(page: str, tmp_path: Path) -> None:
    program = tmp_path / "page.py"
    program.write_text(PAGES[page])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "SPARK_LOCAL_IP": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(program)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=170
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
