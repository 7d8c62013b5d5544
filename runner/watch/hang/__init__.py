"""Who waits for whom, and why.

May import channel, tracebacks and spark_hvd.world. Door: watch.
"""
