"""Spark ML estimators over the runner: DataFrame in, trained Spark ML model out.

Names are loaded on first use: a rank loads no pyspark for a callback, and nobody loads Lightning unasked.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spark_hvd.estimators.backend import LocalBackend, SparkBackend
    from spark_hvd.estimators.callbacks import Callback, CSVLogger, EarlyStopping, MLflow, TensorBoard, TrainState
    from spark_hvd.estimators.errors import (
        CheckpointError,
        DataError,
        EstimatorError,
        ModelError,
        NotFiniteLossError,
        StoreError,
    )
    from spark_hvd.estimators.history import History
    from spark_hvd.estimators.lightning import LightningEstimator, LightningModel
    from spark_hvd.estimators.model import TorchModel
    from spark_hvd.estimators.reuse import clear_materialized_data
    from spark_hvd.estimators.store import Store
    from spark_hvd.estimators.torch import TorchEstimator

_HOME = {
    "CSVLogger": "callbacks",
    "Callback": "callbacks",
    "CheckpointError": "errors",
    "DataError": "errors",
    "EarlyStopping": "callbacks",
    "EstimatorError": "errors",
    "History": "history",
    "LightningEstimator": "lightning",
    "LightningModel": "lightning",
    "LocalBackend": "backend",
    "MLflow": "callbacks",
    "ModelError": "errors",
    "NotFiniteLossError": "errors",
    "SparkBackend": "backend",
    "Store": "store",
    "StoreError": "errors",
    "TensorBoard": "callbacks",
    "TorchEstimator": "torch",
    "TorchModel": "model",
    "TrainState": "callbacks",
    "clear_materialized_data": "reuse",
}

__all__ = [
    "CSVLogger",
    "Callback",
    "CheckpointError",
    "DataError",
    "EarlyStopping",
    "EstimatorError",
    "History",
    "LightningEstimator",
    "LightningModel",
    "LocalBackend",
    "MLflow",
    "ModelError",
    "NotFiniteLossError",
    "SparkBackend",
    "Store",
    "StoreError",
    "TensorBoard",
    "TorchEstimator",
    "TorchModel",
    "TrainState",
    "clear_materialized_data",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"spark_hvd.estimators.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
