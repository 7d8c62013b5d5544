"""What is known of a run while it goes on, as plain values, and who is told of it.

May import config and spark_hvd.world. Doors: view, tracking.
"""
