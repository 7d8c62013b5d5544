"""How ranks and runs end, and what is said of it: payloads, rows, causes, errors.

May import watch.hang, tracebacks and spark_hvd.world. Doors: errors, collect.
"""
