"""Loads TensorFlow, and Keras on it, once in a process that forks ranks. This takes ten seconds of CPU."""

import os

os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow"}

import tensorflow  # noqa: F401 - which loads Keras, on the backend that is named above
