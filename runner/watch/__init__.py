"""The state of a run as plain values, and the trackers that record it.

May import config and spark_hvd.world. Doors: view, tracking.
"""
