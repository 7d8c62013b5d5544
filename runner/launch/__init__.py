"""run and run_local: from arguments to a list of results.

May import every room below: spark, supervise, rank, outcome, watch, channel. Doors: run, local.
"""
