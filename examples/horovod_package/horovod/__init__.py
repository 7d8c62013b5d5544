"""Horovod's names, by spark_hvd: this module gives its place to the one that spark_hvd makes."""

import importlib
import sys

import spark_hvd.horovod  # noqa: F401  finds what follows

del sys.modules[__name__]
importlib.import_module(__name__)
