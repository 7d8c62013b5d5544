"""Keras on torch, imported before ranks are forked: importing it in each rank would take longer than training."""

import os

os.environ["KERAS_BACKEND"] = "torch"

import spark_hvd.keras  # noqa: F401

PID = os.getpid()
"""The process that imported it."""
