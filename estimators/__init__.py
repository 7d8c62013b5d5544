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
        DataError,
        EstimatorError,
        ModelError,
        NotFiniteLossError,
    )
    from spark_hvd.estimators.history import History
    from spark_hvd.estimators.lightning import LightningEstimator, LightningModel
    from spark_hvd.estimators.model import TorchModel
    from spark_hvd.estimators.reuse import clear_materialized_data
    from spark_hvd.estimators.torch import TorchEstimator
    from spark_hvd.store import Store
    from spark_hvd.store_errors import CheckpointError, StoreError

_HOME = {
    "CSVLogger": "spark_hvd.estimators.callbacks",
    "Callback": "spark_hvd.estimators.callbacks",
    "CheckpointError": "spark_hvd.store_errors",
    "DataError": "spark_hvd.estimators.errors",
    "EarlyStopping": "spark_hvd.estimators.callbacks",
    "EstimatorError": "spark_hvd.estimators.errors",
    "History": "spark_hvd.estimators.history",
    "LightningEstimator": "spark_hvd.estimators.lightning",
    "LightningModel": "spark_hvd.estimators.lightning",
    "LocalBackend": "spark_hvd.estimators.backend",
    "MLflow": "spark_hvd.estimators.callbacks",
    "ModelError": "spark_hvd.estimators.errors",
    "NotFiniteLossError": "spark_hvd.estimators.errors",
    "SparkBackend": "spark_hvd.estimators.backend",
    "Store": "spark_hvd.store",
    "StoreError": "spark_hvd.store_errors",
    "TensorBoard": "spark_hvd.estimators.callbacks",
    "TorchEstimator": "spark_hvd.estimators.torch",
    "TorchModel": "spark_hvd.estimators.model",
    "TrainState": "spark_hvd.estimators.callbacks",
    "clear_materialized_data": "spark_hvd.estimators.reuse",
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
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
