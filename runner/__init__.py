"""The runner: Spark tasks become ranks, ranks meet, values and errors come back. Knows nothing of models.

Names are loaded on first use, so that a rank's process never imports pyspark.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spark_hvd.runner.config import Network, Reporting
    from spark_hvd.runner.diagnosis.examine import doctor
    from spark_hvd.runner.diagnosis.report import Finding, Level, Report
    from spark_hvd.runner.elastic.local import run_elastic_local
    from spark_hvd.runner.elastic.run import run_elastic
    from spark_hvd.runner.launch.local import run_local
    from spark_hvd.runner.launch.result import RunResult
    from spark_hvd.runner.launch.run import run
    from spark_hvd.runner.launch.warm import WarmUp, warm_up
    from spark_hvd.runner.outcome.errors import (
        ClusterError,
        ElasticError,
        ExecutorLostError,
        HubError,
        NotEnoughSlotsError,
        RankFailedError,
        ResetLimitError,
        ResultTooLargeError,
        RunError,
        RunTimeoutError,
        SetupError,
        StartTimeoutError,
        StateLostError,
        TooFewRanksError,
    )
    from spark_hvd.runner.outcome.payload import UnpicklableError
    from spark_hvd.runner.watch.mlflow import MlflowTracker
    from spark_hvd.runner.watch.tracking import StopRun, Tracker

__all__ = [
    "ClusterError",
    "ElasticError",
    "ExecutorLostError",
    "Finding",
    "HubError",
    "Level",
    "MlflowTracker",
    "Network",
    "NotEnoughSlotsError",
    "RankFailedError",
    "Report",
    "Reporting",
    "ResetLimitError",
    "ResultTooLargeError",
    "RunError",
    "RunResult",
    "RunTimeoutError",
    "SetupError",
    "StartTimeoutError",
    "StateLostError",
    "StopRun",
    "TooFewRanksError",
    "Tracker",
    "UnpicklableError",
    "WarmUp",
    "doctor",
    "run",
    "run_elastic",
    "run_elastic_local",
    "run_local",
    "warm_up",
]

_HOME = {
    "MlflowTracker": "watch.mlflow",
    "RunResult": "launch.result",
    "UnpicklableError": "outcome.payload",
    "WarmUp": "launch.warm",
    "doctor": "diagnosis.examine",
    "run": "launch.run",
    "run_elastic": "elastic.run",
    "run_elastic_local": "elastic.local",
    "run_local": "launch.local",
    "warm_up": "launch.warm",
    **dict.fromkeys(("Network", "Reporting"), "config"),
    **dict.fromkeys(("StopRun", "Tracker"), "watch.tracking"),
    **dict.fromkeys(("Finding", "Level", "Report"), "diagnosis.report"),
}


def __getattr__(name: str) -> Any:
    if name in __all__:
        if os.name == "nt":
            raise ImportError(
                f"spark_hvd.{name} needs Linux, or macOS for the driver of a cluster of Linux hosts; this is Windows: "
                "use WSL or a container"
            )
        return getattr(importlib.import_module(f"spark_hvd.runner.{_HOME.get(name, 'outcome.errors')}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
