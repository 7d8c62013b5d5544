"""The documented path of :mod:`spark_hvd.estimators.petastorm.bridge`."""

from spark_hvd.estimators.petastorm.bridge import bridged, install

__all__ = ["bridged", "install"]
