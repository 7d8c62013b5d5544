"""The threads in which TensorFlow computes on a rank."""

from __future__ import annotations

import logging
import os

import tensorflow as tf

from spark_hvd.world.env import read_threads, share_cores

_log = logging.getLogger("spark_hvd")


def prepare_threads() -> None:
    """Divide the host's cores as OMP_NUM_THREADS says, if TensorFlow has not started; warn if there is only one."""
    if (threads := read_threads()) is not None:
        share_cores(threads)
    running = tf.config.threading.get_inter_op_parallelism_threads() or os.environ.get("TF_NUM_INTEROP_THREADS")
    if str(running) == "1":
        _log.warning(
            "TensorFlow has one thread to run operations, which a collective holds while it waits: nothing else "
            "runs meanwhile, and collectives of several threads can wait for each other forever. Use two: "
            "tf.config.threading.set_inter_op_parallelism_threads(2), or TF_NUM_INTEROP_THREADS=2"
        )
