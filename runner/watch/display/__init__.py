"""Draws a run: terminal, notebook, browser, log, JSON, figures.

May import watch and config. Door: choose.
"""
