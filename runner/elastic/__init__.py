"""run_elastic: ranks that come and go.

May import launch and what is below it. Door: run.
"""
