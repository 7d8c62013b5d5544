"""Loads a library when a test uses it, because each pytest process collects all tests but runs only some."""

from __future__ import annotations

from typing import Any

import pytest


class Later:
    """A module that takes seconds to import, or hundreds of megabytes. Without it, the test that uses it is skipped."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(pytest.importorskip(self._name), name)
