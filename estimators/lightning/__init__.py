"""LightningEstimator and LightningModel.

May import torch and what is below it. Door: estimator.
"""

from spark_hvd.estimators import __getattr__ as __getattr__  # for what was saved before files moved, as in model.py
