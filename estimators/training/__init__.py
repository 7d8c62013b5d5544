"""What a rank does around a loop, whatever the framework.

May import petastorm, spark_hvd.data, spark_hvd.torch and spark_hvd.checkpoint; no pyspark. Doors: train, spec.
"""
