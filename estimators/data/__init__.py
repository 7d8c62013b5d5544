"""A DataFrame becomes a data set in the store, on the driver and in Spark tasks.

May import runner.spark, spark_hvd.data and spark_hvd.store. Door: materialize.
"""
