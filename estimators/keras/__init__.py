"""KerasEstimator and KerasModel.

May import torch and what is below it, and spark_hvd.keras in ranks. Door: estimator.
"""
