"""Predictions as a function of a DataFrame and any model.

May import keras.module, and transform and what is below it. Door: function.
"""
