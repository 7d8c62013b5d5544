"""Where models name their class that were saved before files moved: Spark ML's reader imports that path."""

from spark_hvd.estimators import __getattr__ as __getattr__
