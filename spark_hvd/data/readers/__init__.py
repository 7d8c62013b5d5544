"""Reads rows as batches on a rank: the contract of readers, the order of an epoch, and the Arrow reader.

May import schemas and spark_hvd.store; no pyspark. Doors: reader, sharding, feed.
"""
