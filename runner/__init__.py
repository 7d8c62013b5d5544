"""The runner: Spark tasks become ranks, the ranks connect, and values and errors come back. It knows nothing of models.

Names are loaded on first use, so that a rank's process never imports pyspark.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from spark_hvd.world.lazy import names_of

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

_find, __dir__ = names_of(
    __name__,
    {
        "runner.config": "Network Reporting",
        "runner.diagnosis.examine": "doctor",
        "runner.diagnosis.report": "Finding Level Report",
        "runner.elastic.local": "run_elastic_local",
        "runner.elastic.run": "run_elastic",
        "runner.launch.local": "run_local",
        "runner.launch.result": "RunResult",
        "runner.launch.run": "run",
        "runner.launch.warm": "WarmUp warm_up",
        "runner.outcome.errors": "ClusterError ElasticError ExecutorLostError HubError NotEnoughSlotsError "
        "RankFailedError ResetLimitError ResultTooLargeError RunError RunTimeoutError SetupError StartTimeoutError "
        "StateLostError TooFewRanksError",
        "runner.outcome.payload": "UnpicklableError",
        "runner.watch.mlflow": "MlflowTracker",
        "runner.watch.tracking": "StopRun Tracker",
    },
)


def __getattr__(name: str) -> Any:
    if name in __all__ and os.name == "nt":
        raise ImportError(
            f"spark_hvd.{name} needs Linux, or macOS for the driver of a cluster of Linux hosts; this is Windows: "
            "use WSL or a container"
        )
    return _find(name)
