"""Draws a run in the terminal, a notebook, a browser or a log, as JSON, and as figures.

May import watch and config. Door: choose.
"""
