"""TorchEstimator and TorchModel: their loop and their trial.

May import fit and what is below it. Doors: estimator, model.
"""
