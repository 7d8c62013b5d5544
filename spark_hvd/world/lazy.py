"""Names that a package imports from its modules on first use (PEP 562), so that importing it loads little."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def names_of(
    package: str, homes: Mapping[str, str], absent: Mapping[str, Callable[[], object]] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` for a package.

    ``homes`` maps modules below ``spark_hvd`` to their names. ``absent`` maps optional packages to functions that raise
    a better error if the package is missing.
    """
    home = {name: module for module, names in homes.items() for name in names.split()}

    def find(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            return getattr(importlib.import_module(f"spark_hvd.{home[name]}"), name)
        except ModuleNotFoundError as error:
            if say := (absent or {}).get((error.name or "").partition(".")[0]):
                say()
            raise

    return find, lambda: sorted(sys.modules[package].__all__)
