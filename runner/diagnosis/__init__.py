"""The doctor: checks whether ``run`` will work here, and says why if not.

May import launch and what is below it. Doors: examine, report.
"""
