"""``run`` and ``run_local``: from arguments to a list of results.

May import every room below (spark, supervise, rank, outcome, watch, channel), scratch and spark_hvd.data. Doors: run,
local, arguments.
"""
