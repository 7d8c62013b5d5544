"""The rows that a rank trains on, for any framework.

May import store, world and its own readers; no pyspark. Doors: readers, spool.
"""
