"""Hyperparameter search: runs several trials of an Optuna study at a time.

May import launch and what is below it. Door: `spark_hvd.tuning`.
"""
