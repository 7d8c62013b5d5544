"""What runs in a Spark task: finds its ranks, forks them, watches them.

May import channel, outcome, config and spark_hvd.world; rank.main only in the forked process. No pyspark, no torch.
Door: task.
"""
