"""Launchers of others by their own names: programs for PySpark's TorchDistributor and Databricks' HorovodRunner.

Names are loaded on first use: ranks take their rows from here too, and load nothing of the driver's.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spark_hvd.runner.compat.horovod_runner import HorovodRunner
    from spark_hvd.runner.compat.partition import get_spark_partition_data_loader
    from spark_hvd.runner.compat.torch_distributor import TorchDistributor

__all__ = ["HorovodRunner", "TorchDistributor", "get_spark_partition_data_loader"]

_HOMES = {
    "HorovodRunner": "horovod_runner",
    "TorchDistributor": "torch_distributor",
    "get_spark_partition_data_loader": "partition",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"spark_hvd.runner.compat.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
