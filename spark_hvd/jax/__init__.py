"""The API for JAX: ``import spark_hvd.jax as hvd``.

May import every other room of spark_hvd but those for other frameworks. Doors: itself.
"""

from __future__ import annotations

try:
    import jax  # noqa: F401  before anything else that takes time
except ModuleNotFoundError as error:
    if error.name not in ("jax", "jaxlib"):
        raise
    raise ImportError(
        "spark_hvd.jax needs JAX, in the Python of each rank: pip install 'jax>=0.10', or 'jax[cuda13]' for GPUs"
    ) from error

from spark_hvd import checkpoint
from spark_hvd.collectives.objects import allgather_object, broadcast_object
from spark_hvd.context import basics
from spark_hvd.context.basics import *  # noqa: F403 - all of them, by their __all__
from spark_hvd.context.global_state import is_initialized
from spark_hvd.context.leave import shutdown
from spark_hvd.context.progress import progress
from spark_hvd.data.registry import get_dataset_shard
from spark_hvd.jax.batches import global_batches
from spark_hvd.jax.cluster import init
from spark_hvd.jax.trees import broadcast, load_state_dict, state_dict

__all__ = [
    "allgather_object",
    "broadcast",
    "broadcast_object",
    "checkpoint",
    "get_dataset_shard",
    "global_batches",
    "init",
    "is_initialized",
    "load_state_dict",
    "progress",
    "shutdown",
    "state_dict",
]
__all__ += basics.__all__
