"""Classifiers of text and images: estimators of raw columns, whose ranks make the tensors themselves.

May import inference and torch, and what is below them. Doors: image, text.
"""
