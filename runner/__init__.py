"""The runner: Spark tasks become ranks, ranks meet, values and errors come back. Knows nothing of models.

Names are loaded on first use, so that a rank's process never imports pyspark.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spark_hvd.runner.errors import (
        ClusterError,
        ExecutorLostError,
        NotEnoughSlotsError,
        RankFailedError,
        ResultTooLargeError,
        RunError,
        RunTimeoutError,
        SetupError,
        StartTimeoutError,
        UnpicklableError,
    )
    from spark_hvd.runner.examination import doctor
    from spark_hvd.runner.launch import run
    from spark_hvd.runner.local import run_local
    from spark_hvd.runner.report import Finding, Level, Report

__all__ = [
    "ClusterError",
    "ExecutorLostError",
    "Finding",
    "Level",
    "NotEnoughSlotsError",
    "RankFailedError",
    "Report",
    "ResultTooLargeError",
    "RunError",
    "RunTimeoutError",
    "SetupError",
    "StartTimeoutError",
    "UnpicklableError",
    "doctor",
    "run",
    "run_local",
]

_HOME = {
    "doctor": "examination",
    "run": "launch",
    "run_local": "local",
    **dict.fromkeys(("Finding", "Level", "Report"), "report"),
}


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module(f"spark_hvd.runner.{_HOME.get(name, 'errors')}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
