"""What a rank does around a training loop of any framework: weights, data, checkpoints, history.

May import petastorm, spark_hvd.data, spark_hvd.torch and spark_hvd.checkpoint; no pyspark. Doors: train, spec.
"""
