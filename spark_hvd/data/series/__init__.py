"""Time series: turns a long table, with a row for each key and time, into a row for each piece of a series.

May import readers; no torch, no pyspark. Doors: windows, pieces.
"""
