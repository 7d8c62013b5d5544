"""What files of Parquet hold, as it is meant: types that are alike, a table's columns, rows that are deleted.

May import nothing of ours; no torch, no pyspark. Door: table.
"""
