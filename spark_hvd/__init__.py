"""Distributed deep-learning training as a Spark job: ``spark_hvd.run``, and ``import spark_hvd.torch as hvd``."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spark_hvd.runner import doctor, run, run_elastic, run_elastic_local, run_local

__version__ = "0.1.0"

__all__ = ["__version__", "doctor", "run", "run_elastic", "run_elastic_local", "run_local"]

# The launchers bring pyspark; a rank that imports the collectives loads none of it (PEP 562).
_LAUNCHERS = ("doctor", "run", "run_elastic", "run_elastic_local", "run_local")


def __getattr__(name: str) -> Any:
    if name in _LAUNCHERS:
        return getattr(importlib.import_module("spark_hvd.runner"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAUNCHERS})
