"""Models that were saved, with their optimizers made distributed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import keras

from spark_hvd.collectives.compression import Compression
from spark_hvd.keras.optimizer import DistributedOptimizer
from spark_hvd.torch.optimizer.flat import GradientCompressor


def load_model(
    filepath: Any,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: GradientCompressor = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """Load a model that Keras has saved, and make its optimizer a DistributedOptimizer with the state that it had.

    Args:
        filepath: A ``.keras`` file, or whatever ``keras.models.load_model`` takes.
        custom_optimizers: Classes of optimizers that are not Keras' own.
        custom_objects: Other names -> classes and functions that Keras needs to know.
        compression: Of gradients, see DistributedOptimizer.
        legacy_opts: Optimizers of Keras 2, which Keras 3 has not: True is an error.

    Raises:
        ValueError: `legacy_opts` is true, or Keras cannot load the model.
    """
    if legacy_opts:
        raise ValueError("legacy_opts=True: Keras 3 has no optimizers of Keras 2; save the model with new ones.")
    objects = {each.__name__: each for each in custom_optimizers or ()} | dict(custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=objects)
    if getattr(model, "optimizer", None) is not None:
        model.optimizer = DistributedOptimizer(model.optimizer, compression=compression)
    return model
