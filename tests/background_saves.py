"""What tests of saves in the background share: a store that goes away, and what is told of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spark_hvd.store.errors import StoreError


def break_it(folder: Path) -> None:
    """A file lies where the folder was."""
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
