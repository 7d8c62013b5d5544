"""Lets one thread end the runs of others, which check for that wherever they wait."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_signal: ContextVar[threading.Event | None] = ContextVar("spark_hvd_stop", default=None)


@contextmanager
def stopped_by(signal: threading.Event) -> Iterator[None]:
    """End the runs that this thread starts in this context, as by Ctrl-C, once ``signal`` is set."""
    token = _signal.set(signal)
    try:
        yield
    finally:
        _signal.reset(token)


def check_stop() -> None:
    """Check whether this thread's runs should end. Code that waits in a run calls this many times a second.

    Raises:
        KeyboardInterrupt: this thread's runs should end.
    """
    signal = _signal.get()
    if signal is not None and signal.is_set():
        raise KeyboardInterrupt
