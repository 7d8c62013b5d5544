"""What the options of ``run`` and its like mean, for the pages of the API: that part of their docstrings is made."""

from __future__ import annotations

import inspect
from typing import Any

import griffe

import spark_hvd


class MadeDocstrings(griffe.Extension):
    """Gives functions that are decorated with ``launcher`` the docstrings that they have when they are imported."""

    def on_function(self, *, func: griffe.Function, **kwargs: Any) -> None:
        """Called for each function, once it and its docstring were read."""
        if func.docstring is not None and any("launcher(" in str(each.value) for each in func.decorators):
            func.docstring.value = inspect.getdoc(getattr(spark_hvd, func.name)) or ""
