"""Every call to PySpark; only the module private uses its private names.

May import outcome, spark_hvd.world and spark_hvd.data. Doors: session, job.
"""
