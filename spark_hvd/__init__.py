"""Distributed deep learning on Spark: ``spark_hvd.run``, ``import spark_hvd.torch as hvd``, ``spark_hvd.predict``."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spark_hvd.data.readers.errors import DataError
    from spark_hvd.estimators.inference.function import predict
    from spark_hvd.runner import Network, Reporting, doctor, run, run_elastic, run_elastic_local, run_local, warm_up
    from spark_hvd.world.errors import (
        CollectiveError,
        DuplicateNameError,
        HostsUpdatedInterrupt,
        MismatchError,
        NotInitializedError,
        PlanMismatchError,
        StalledError,
    )

__version__ = "0.1.0"

__all__ = [
    "CollectiveError",
    "DataError",
    "DuplicateNameError",
    "HostsUpdatedInterrupt",
    "MismatchError",
    "Network",
    "NotInitializedError",
    "PlanMismatchError",
    "Reporting",
    "StalledError",
    "__version__",
    "doctor",
    "predict",
    "run",
    "run_elastic",
    "run_elastic_local",
    "run_local",
    "warm_up",
]

# The launchers bring pyspark; a rank that imports the collectives loads none of it (PEP 562).
_LAUNCHERS = ("Network", "Reporting", "doctor", "run", "run_elastic", "run_elastic_local", "run_local", "warm_up")
_HOMES = {"DataError": "spark_hvd.data.readers.errors", "predict": "spark_hvd.estimators"}


def __getattr__(name: str) -> Any:
    if name in __all__:
        home = "spark_hvd.runner" if name in _LAUNCHERS else _HOMES.get(name, "spark_hvd.world.errors")
        return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
