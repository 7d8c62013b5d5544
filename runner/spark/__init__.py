"""All that is asked of PySpark; private is the one place of its private names.

May import outcome, spark_hvd.world and spark_hvd.data. Doors: session, job.
"""
