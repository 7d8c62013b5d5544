"""Keras on torch, to be imported before ranks are forked: for each of them that would take longer than to train."""

import os

os.environ["KERAS_BACKEND"] = "torch"

import spark_hvd.keras  # noqa: F401

PID = os.getpid()
"""The process that imported it."""
