"""``hvd.checkpoint``: saves what a training function needs to continue after a restart, in a folder or a store.

::

    saved = hvd.checkpoint.load(folder)                  # None the first time; the same on every rank
    first = 0
    if saved is not None:
        model.load_state_dict(saved.state["model"])
        first = saved.step
    for step in range(first, steps):
        ...
        if (step + 1) % 100 == 0:
            hvd.checkpoint.save(folder, {"model": model.state_dict()}, step + 1, wait=False)

May import the context and what is below it, and spark_hvd.store.
"""

from __future__ import annotations

from spark_hvd.checkpoint.api import Checkpoint, SaveHandle, latest, load, load_sharded, save, save_sharded

__all__ = ["Checkpoint", "SaveHandle", "latest", "load", "load_sharded", "save", "save_sharded"]
