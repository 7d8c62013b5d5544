"""Will run() work here, and if not, why not.

May import launch and what is below it. Doors: examine, report.
"""
