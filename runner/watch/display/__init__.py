"""Draws a run: terminal, notebook, log, JSON, figures.

May import watch, config and spark_hvd.timeline. Door: choose.
"""
