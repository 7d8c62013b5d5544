"""Rank and size as operations of a graph, evaluated whenever the graph runs, because worlds change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from spark_hvd.collectives.process_set import ProcessSet, global_process_set
from spark_hvd.context import basics
from spark_hvd.context.global_state import current
from spark_hvd.tensorflow.tensors import unconverted


def size_op(process_set_id: ProcessSet | int = global_process_set, name: str | None = None) -> Any:
    """Return the number of ranks in a process set, which may be passed as its number; int32."""
    return _int_op(lambda: _set_of(process_set_id).size(), name)


def rank_op(name: str | None = None) -> Any:
    """Return this process's rank; int32."""
    return _int_op(basics.rank, name)


def local_rank_op(name: str | None = None) -> Any:
    """Return this rank's position among the ranks of its host; int32."""
    return _int_op(basics.local_rank, name)


def local_size_op(name: str | None = None) -> Any:
    """Return the number of ranks on this host; int32."""
    return _int_op(basics.local_size, name)


def process_set_included_op(process_set_id: ProcessSet | int = global_process_set, name: str | None = None) -> Any:
    """Return whether this rank is in a process set, which may be passed as its number: 1 or 0, int32."""
    return _int_op(lambda: int(bool(_set_of(process_set_id).included())), name)


def _set_of(given: ProcessSet | int) -> ProcessSet:
    if not isinstance(given, int):
        return given
    sets = current().process_sets
    if given and given not in sets:
        raise ValueError(f"process_set_id={given}: expected 0, for all ranks, or one of {sorted(sets)}")
    return sets[given] if given else global_process_set


@unconverted
def _int_op(read: Callable[[], int | None], name: str | None) -> Any:
    result = tf.py_function(lambda: tf.constant(read(), tf.int32), [], tf.int32, name=name)
    result.set_shape(())
    return result
