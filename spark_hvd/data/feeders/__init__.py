"""Rows that go through a function on their way to a rank, in Spark tasks of their own: feeders.

May import readers and the engine's keys; no torch, no pyspark. Doors: mapping, directory, feeder, pool.
"""
