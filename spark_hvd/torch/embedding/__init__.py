"""Embedding tables that are cut by rows over the ranks, and what looks up, trains and saves them.

May import the context, elastic and what is below them; of spark_hvd.torch nothing else. Doors: table, look_up, whole,
rowwise.
"""
