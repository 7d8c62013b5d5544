"""The reader for Unischema data; the one place that knows Petastorm's internals.

May import errors, spark_hvd.data and spark_hvd.store. Doors: reader, bridge.
"""
