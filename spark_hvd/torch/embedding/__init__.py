"""Embedding tables whose rows are divided among the ranks: looking up, training and saving them.

May import the context, elastic and what is below them; of spark_hvd.torch nothing else. Doors: table, look_up, whole,
rowwise.
"""
