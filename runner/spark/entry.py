"""The function that Spark runs in each task."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from spark_hvd.runner.outcome.rows import SPOOL_ABOVE


def task_of(
    module: str, function: str, spec: bytes, payload: bytes, *, spool: str | None = None, has_input: bool = False
) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Return a task for ``mapInArrow`` that calls a function of a module of the runner.

    The task is a nested function, which is pickled by value. So it starts even on an executor without spark_hvd, and
    can say that spark_hvd is missing. The function yields record batches; with ``has_input`` it also gets the task's
    input. A payload above 16 MiB is written to the directory ``spool``, if given: Spark would hold it in the Java heap.
    """
    file = None
    if spool is not None and len(payload) > SPOOL_ABOVE:
        file = Path(spool, "call")
        file.write_bytes(payload)
        payload = b""

    def spark_hvd_task(batches: Iterator[Any]) -> Iterator[Any]:
        import importlib
        import pickle
        import platform
        import socket
        import sys

        if not has_input:
            for _ in batches:
                pass
        try:
            work = getattr(importlib.import_module(f"spark_hvd.runner.{module}"), function)
        except ImportError as error:
            raise ImportError(
                f"SPARK_HVD_SETUP: {type(error).__name__}: {error}; Python {platform.python_version()} "
                f"({sys.executable}) on host {socket.gethostname()} cannot import spark_hvd.:END"
            ) from None
        given = payload if file is None else file.read_bytes()
        yield from work(pickle.loads(spec), given, *([batches] if has_input else []))

    return spark_hvd_task
