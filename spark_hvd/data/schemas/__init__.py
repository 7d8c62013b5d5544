"""The meaning of Parquet files: equivalent types, the columns of a table, and deleted rows.

May import nothing of ours; no torch, no pyspark. Door: table.
"""
