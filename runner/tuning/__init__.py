"""Hyperparameters: trials of an Optuna study as runs, several side by side.

May import launch and what is below it. Door: `spark_hvd.tuning`.
"""
