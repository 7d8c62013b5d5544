"""A DataFrame's features through a trained model.

May import data, training and the runner. Doors: predict, outputs.
"""
