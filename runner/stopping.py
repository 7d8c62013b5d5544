"""How one thread ends the runs of others: these look whether they are to stop, wherever they wait."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_signal: ContextVar[threading.Event | None] = ContextVar("spark_hvd_stop", default=None)


@contextmanager
def stopped_by(signal: threading.Event) -> Iterator[None]:
    """Have the runs that this thread makes meanwhile end as by Ctrl-C once ``signal`` is set."""
    token = _signal.set(signal)
    try:
        yield
    finally:
        _signal.reset(token)


def check_stop() -> None:
    """To be called many times a second by whoever waits in a run.

    Raises:
        KeyboardInterrupt: this thread's runs are to end.
    """
    signal = _signal.get()
    if signal is not None and signal.is_set():
        raise KeyboardInterrupt
