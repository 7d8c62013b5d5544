"""Spark ML parameters: declared, checked, saved.

May import training, runner.spark and runner.config. Doors: tables, persistence.
"""
