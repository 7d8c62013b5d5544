"""Switches on the dialect: under Horovod's name, numbers and errors are Horovod's."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

from spark_hvd.world.env import HOROVOD_DIALECT, read_log_level


def switch_on() -> None:
    """Use the dialect from now on, in worlds that this process joins and in ranks that it starts."""
    os.environ.update(HOROVOD_DIALECT)
    level = read_log_level()
    if level is not None:
        logging.getLogger("spark_hvd").setLevel(level)
    if "spark_hvd.context.init" in sys.modules:
        _export_rank()


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Join the world in Horovod's dialect, or switch a joined world to it; see :func:`spark_hvd.torch.init`.

    This sets Horovod's variables, such as HOROVOD_RANK, for programs that read them.
    """
    from spark_hvd.context import init as context
    from spark_hvd.context.global_state import in_world, speaks_horovod

    change = {"dialect": "horovod"} if in_world() and not speaks_horovod() else {}
    context.init(comm, process_sets, **change)
    _export_rank()


def _export_rank() -> None:
    from spark_hvd.context import basics
    from spark_hvd.context.global_state import is_initialized

    if is_initialized():
        for name in ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size"):
            os.environ[f"HOROVOD_{name.upper()}"] = str(getattr(basics, name)())
