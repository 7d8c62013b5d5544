"""How a notebook shows an error of a run: its message, and the user's lines that led to it; no frames of ours."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from spark_hvd.runner.tracebacks import library_of

P = ParamSpec("P")
R = TypeVar("R")


class Brief(BaseException):
    """Base of errors whose message says it all. Python's own traceback stays whole: ``traceback.print_exception``."""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows instead of a traceback, as lines."""
        lines = []
        for frame in traceback.extract_tb(self.__traceback__):
            library = library_of(frame.filename)
            if library == "spark_hvd":
                break
            if not library:
                cell = "/ipykernel_" in frame.filename or frame.filename.startswith("<ipython-input")
                lines.append(f"{'Cell' if cell else f'File {frame.filename}'}, line {frame.lineno}, in {frame.name}")
                lines.append(f"    {frame.line}")
        return [*lines, *([""] if lines else []), *f"{type(self).__name__}: {self}".splitlines()]


def briefly(function: Callable[P, R]) -> Callable[P, R]:
    """Have errors that say it all leave a function without the frames in it, so that the caller's come last."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except Brief as error:
            raise error.with_traceback(None) from error.__cause__

    return call
