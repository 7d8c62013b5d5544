"""``import spark_hvd.tensorflow.keras as hvd``: Horovod's other name for the API for Keras, the same module."""

from __future__ import annotations

import importlib
import sys

_face = importlib.import_module("spark_hvd.keras")  # imports point upward only at run time
sys.modules |= {__name__: _face, f"{__name__}.callbacks": _face.callbacks, f"{__name__}.elastic": _face.elastic}
