"""Time series: how a long table, a row for each key and time, becomes a row for each piece of a series.

May import readers; no torch, no pyspark. Doors: windows, pieces.
"""
