"""What the options of ``run`` and its like mean, for the pages of the API: that part of their docstrings is made."""

from __future__ import annotations

import inspect
from typing import Any

import griffe

import spark_hvd


class MadeDocstrings(griffe.Extension):
    """Gives what is decorated with ``launcher`` or ``described`` the docstring that it has when it is imported.

    Functions with the former have a first argument, the config, that their callers do not know of.
    """

    def on_function(self, *, func: griffe.Function, **kwargs: Any) -> None:
        """Called for each function, once it and its docstring were read."""
        if func.docstring is not None and any("launcher(" in str(each.value) for each in func.decorators):
            func.docstring.value = inspect.getdoc(getattr(spark_hvd, func.name)) or ""
            del func.parameters["config"]

    def on_class(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        """Complete a class once it and its docstring were read."""
        if cls.docstring is not None and any(str(each.value) == "described" for each in cls.decorators):
            cls.docstring.value = inspect.getdoc(getattr(spark_hvd, cls.name)) or ""
