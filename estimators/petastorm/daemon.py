"""Spark's Python daemon with the Petastorm bridge installed, for workers that unpickle Petastorm's objects.

Set ``spark.python.daemon.module`` to this module's name when the session starts.
"""

from pyspark.daemon import manager

from spark_hvd.estimators.petastorm.bridge import install

if __name__ == "__main__":
    install()
    manager()
