"""The code of a Spark task: finds its ranks, forks them, watches them.

May import channel, outcome, config, spark_hvd.world, scratch, data (for the rows that a task gets) and, of rank, spec
and gpus; only the fork server imports what runs in a rank. No pyspark, no torch. Door: task.
"""
