"""What runs in a Spark task: finds its ranks, forks them, watches them.

May import channel, outcome, config, spark_hvd.world, scratch, data (for the rows that a task is given) and, of rank,
what it orders (order, gpus); what runs in a rank is imported by the fork server alone. No pyspark, no torch. Door:
task.
"""
