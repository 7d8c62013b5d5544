"""Applies a trained model to the features of a DataFrame.

May import data, training and the runner. Doors: predict, outputs.
"""
