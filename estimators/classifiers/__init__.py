"""Classifiers of text: estimators of raw columns, whose ranks make the tensors themselves.

May import inference and torch, and what is below them. Door: text.
"""
