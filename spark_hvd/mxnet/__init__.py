"""The API for MXNet 1.9, a library retired in 2023: ``import spark_hvd.mxnet as hvd``.

May import every other room of spark_hvd but those for jax, keras and tensorflow. Doors: itself.
"""

from spark_hvd.collectives.compression import Compression
from spark_hvd.context import api, basics
from spark_hvd.context.api import *  # noqa: F403 - all of them, by their __all__
from spark_hvd.context.basics import *  # noqa: F403
from spark_hvd.mxnet import collectives
from spark_hvd.mxnet.collectives import *  # noqa: F403
from spark_hvd.mxnet.optimizer import DistributedOptimizer
from spark_hvd.mxnet.sync import broadcast_parameters
from spark_hvd.mxnet.trainer import DistributedTrainer

__all__ = ["Compression", "DistributedOptimizer", "DistributedTrainer", "broadcast_parameters"]
__all__ += api.__all__
__all__ += basics.__all__
__all__ += collectives.__all__
