"""The ends of ranks and runs: payloads, rows, causes, errors.

May import watch.hang, tracebacks and spark_hvd.world. Doors: errors, collect.
"""
