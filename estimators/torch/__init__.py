"""TorchEstimator and TorchModel: their training loop, and the trial of one batch.

May import fit and what is below it. Doors: estimator, model.
"""

from spark_hvd.estimators import __getattr__ as __getattr__  # for what was saved before files moved, as in model.py
