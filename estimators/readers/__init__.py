"""Rows become batches on a rank: the contract, shards, Arrow.

May import errors and spark_hvd.store; no pyspark. Door: reader.
"""
