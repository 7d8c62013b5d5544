"""``import spark_hvd.tensorflow.keras as hvd``: the face for Keras by Horovod's other name for it, the same module."""

from __future__ import annotations

import importlib
import sys

_face = importlib.import_module("spark_hvd.keras")  # the face above this one
sys.modules |= {__name__: _face, f"{__name__}.callbacks": _face.callbacks, f"{__name__}.elastic": _face.elastic}
