"""Spark ML estimators over the runner: DataFrame in, trained Spark ML model out.

Names are loaded on first use: a rank loads no pyspark for a callback, and nobody loads Lightning unasked.
"""

from typing import TYPE_CHECKING

from spark_hvd.runner.spark.needed import check_pyspark
from spark_hvd.world.lazy import names_of

if TYPE_CHECKING:
    from spark_hvd.data.readers.errors import DataError
    from spark_hvd.estimators.classifiers.image import ImageClassificationModel, ImageClassifier
    from spark_hvd.estimators.classifiers.text import TextClassificationModel, TextClassifier
    from spark_hvd.estimators.data.reuse import clear_materialized_data
    from spark_hvd.estimators.errors import EstimatorError, ModelError, NotFiniteLossError
    from spark_hvd.estimators.fit.backend import LocalBackend, SparkBackend
    from spark_hvd.estimators.keras.estimator import KerasEstimator, KerasModel
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

_NAMES = {
    "estimators.classifiers.image": "ImageClassificationModel ImageClassifier",
    "estimators.classifiers.text": "TextClassificationModel TextClassifier",
    "estimators.data.reuse": "clear_materialized_data",
    "data.readers.errors": "DataError",
    "estimators.errors": "EstimatorError ModelError NotFiniteLossError",
    "estimators.fit.backend": "LocalBackend SparkBackend",
    "estimators.inference.function": "predict",
    "estimators.keras.estimator": "KerasEstimator KerasModel",
    "estimators.lightning.estimator": "LightningEstimator LightningModel",
    "estimators.torch.estimator": "TorchEstimator",
    "estimators.torch.model": "TorchModel",
    "estimators.training.callbacks": "CSVLogger Callback EarlyStopping MLflow TensorBoard TrainState",
    "estimators.training.history": "History",
    "store": "Store",
    "store.errors": "CheckpointError StoreError",
}
__getattr__, __dir__ = names_of(__name__, _NAMES, {"pyspark": check_pyspark})

__all__ = [
    "CSVLogger",
    "Callback",
    "CheckpointError",
    "DataError",
    "EarlyStopping",
    "EstimatorError",
    "History",
    "ImageClassificationModel",
    "ImageClassifier",
    "KerasEstimator",
    "KerasModel",
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
    "TextClassificationModel",
    "TextClassifier",
    "TorchEstimator",
    "TorchModel",
    "TrainState",
    "clear_materialized_data",
]
