"""Helpers for tests of background saves: a store that becomes unwritable, and the messages about it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spark_hvd.store.errors import StoreError


def break_it(folder: Path) -> None:
    """Put a file where the folder was."""
    shutil.rmtree(folder)
    folder.touch()


def mend(folder: Path) -> None:
    folder.unlink()
    folder.mkdir()


def raised(call: Callable[[], Any]) -> str:
    try:
        call()
    except StoreError as error:
        return str(error)
    return ""
