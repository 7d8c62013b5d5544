"""LightningEstimator and LightningModel.

May import torch and what is below it. Door: estimator.
"""
