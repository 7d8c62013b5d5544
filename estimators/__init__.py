"""Spark ML estimators over the runner: DataFrame in, trained Spark ML model out.

Names are loaded on first use: a rank loads no pyspark for a callback, and nobody loads Lightning unasked.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spark_hvd.estimators.data.reuse import clear_materialized_data
    from spark_hvd.estimators.errors import DataError, EstimatorError, ModelError, NotFiniteLossError
    from spark_hvd.estimators.fit.backend import LocalBackend, SparkBackend
    from spark_hvd.estimators.lightning.estimator import LightningEstimator, LightningModel
    from spark_hvd.estimators.torch.estimator import TorchEstimator
    from spark_hvd.estimators.torch.model import TorchModel
    from spark_hvd.estimators.training.callbacks import (
        Callback,
        CSVLogger,
        EarlyStopping,
        MLflow,
        TensorBoard,
        TrainState,
    )
    from spark_hvd.estimators.training.history import History
    from spark_hvd.store import Store
    from spark_hvd.store.errors import CheckpointError, StoreError

_HOME = {
    "CSVLogger": "spark_hvd.estimators.training.callbacks",
    "Callback": "spark_hvd.estimators.training.callbacks",
    "CheckpointError": "spark_hvd.store.errors",
    "DataError": "spark_hvd.estimators.errors",
    "EarlyStopping": "spark_hvd.estimators.training.callbacks",
    "EstimatorError": "spark_hvd.estimators.errors",
    "History": "spark_hvd.estimators.training.history",
    "LightningEstimator": "spark_hvd.estimators.lightning.estimator",
    "LightningModel": "spark_hvd.estimators.lightning.estimator",
    "LocalBackend": "spark_hvd.estimators.fit.backend",
    "MLflow": "spark_hvd.estimators.training.callbacks",
    "ModelError": "spark_hvd.estimators.errors",
    "NotFiniteLossError": "spark_hvd.estimators.errors",
    "SparkBackend": "spark_hvd.estimators.fit.backend",
    "Store": "spark_hvd.store",
    "StoreError": "spark_hvd.store.errors",
    "TensorBoard": "spark_hvd.estimators.training.callbacks",
    "TorchEstimator": "spark_hvd.estimators.torch.estimator",
    "TorchModel": "spark_hvd.estimators.torch.model",
    "TrainState": "spark_hvd.estimators.training.callbacks",
    "clear_materialized_data": "spark_hvd.estimators.data.reuse",
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
