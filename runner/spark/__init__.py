"""All that is asked of PySpark; private is the one place of its private names.

May import outcome and spark_hvd.world. Doors: session, job.
"""
