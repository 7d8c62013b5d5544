"""Imports that go on while Spark works."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def importing(name: str) -> Iterator[None]:
    """Import a module in a thread, and have it when this ends; in between this thread is to import nothing of torch's.

    Args:
        name: Of the module. One that cannot be imported is for its user to report.
    """

    def load() -> None:
        with suppress(Exception):
            importlib.import_module(name)

    thread = threading.Thread(target=load, name="spark_hvd-import", daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()
