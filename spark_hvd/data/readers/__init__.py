"""Rows become batches on a rank: the contract, the line of an epoch, Arrow.

May import schemas and spark_hvd.store; no pyspark. Doors: reader, sharding, feed.
"""
