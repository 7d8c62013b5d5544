"""What comes of mistakes and of pages, which one program tries: most of their time would be the start of Spark."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.walk.mistakes import MISTAKES
from tests.walk.pages import LAST, PROGRAMS
from tests.walk.stranger import typed


@pytest.fixture(scope="session")
def told(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What was said of all mistakes, if this session tests one, and of the pages that it tests.

    Some need an earlier run, by which Spark's workers have this program's Python.
    """
    items = (item for item in request.session.items if "told" in getattr(item, "fixturenames", ()))
    asked = [item.callspec.params for item in items if hasattr(item, "callspec")]
    names = [*MISTAKES] if any("mistake" in params for params in asked) else []
    pages = {params["page"] for params in asked if "page" in params}
    pages |= {"README"} if pages else set()
    folder = tmp_path_factory.mktemp("walk")
    (folder / "pages").mkdir()  # where no module has a page's name
    for page in sorted(pages, key=lambda page: (page in LAST, page)):
        script = folder / "pages" / f"{page}.py"
        script.write_text(PROGRAMS[page])
        names.append(str(script))
    lines = typed(folder, "-m", "tests.walk.talk", str(folder), *names, timeout=1700).splitlines()
    return {each["name"]: each for each in map(json.loads, (line for line in lines if line.startswith('{"name"')))}
