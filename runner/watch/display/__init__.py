"""Draws a run: terminal, notebook, log, JSON, figures.

May import watch and config. Door: choose.
"""
