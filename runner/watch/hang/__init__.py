"""Finds out which ranks wait for which, and why.

May import channel, tracebacks and spark_hvd.world. Door: watch.
"""
