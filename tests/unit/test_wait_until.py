"""A test's deadline fails the test, whatever the code under test catches."""

from __future__ import annotations

import contextlib

import pytest

from tests.ranks import wait_until


def test_a_deadline_is_not_caught_as_an_exception() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"not true within 0 s"), contextlib.suppress(Exception):
        wait_until(lambda: False, 0)
