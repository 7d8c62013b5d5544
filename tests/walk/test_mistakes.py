"""The message about each mistake: its value, its place and the next step; and the session continues."""

from __future__ import annotations

from typing import Any

import pytest

from tests.walk.mistakes import MISTAKES, NEVER


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_message_says_what_where_and_what_next(told: dict[str, dict[str, Any]], mistake: str) -> None:
    made, said = MISTAKES[mistake], told[mistake]["said"]
    assert (told[mistake]["message"] is not None) == made.fails, said
    missing = [part for part in (made.value, made.place, made.step) if part not in said]
    assert missing == [], said
    message = told[mistake]["message"] or said
    assert [word for word in NEVER if word in message] == [], message
    assert told[mistake].get("runs") == ([2, 2] if made.shakes else None)
