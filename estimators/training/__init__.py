"""What a rank does around a loop, whatever the framework.

May import readers, petastorm, spark_hvd.torch and spark_hvd.checkpoint; no pyspark. Doors: train, spec.
"""
