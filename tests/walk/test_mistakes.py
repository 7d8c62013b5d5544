"""The message about each mistake: its value, its place and the next step; and the session continues."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.walk.mistakes import MISTAKES, NEVER
from tests.walk.stranger import typed


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("walk")
    lines = typed(folder, "-m", "tests.walk.talk", str(folder), timeout=580).splitlines()
    return {each["name"]: each for each in map(json.loads, lines)}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", MISTAKES)
def test_the_message_says_what_where_and_what_next(told: dict[str, dict[str, Any]], name: str) -> None:
    mistake, said = MISTAKES[name], told[name]["said"]
    assert (told[name]["message"] is not None) == mistake.fails, said
    missing = [part for part in (mistake.value, mistake.place, mistake.step) if part not in said]
    assert missing == [], said
    message = told[name]["message"] or said
    assert [word for word in NEVER if word in message] == [], message
    assert told[name].get("runs") == ([2, 2] if mistake.shakes else None)
