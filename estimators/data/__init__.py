"""A DataFrame becomes a data set in the store, on the driver and in Spark tasks.

May import readers, runner.spark and spark_hvd.store. Doors: materialize, parquet.
"""
