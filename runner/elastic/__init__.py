"""``run_elastic``: ranks join and leave while they train.

May import launch and what is below it. Door: run.
"""
