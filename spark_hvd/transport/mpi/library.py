"""MPI, through mpi4py: importing this module starts MPI, unless the program has already done so.

Nothing else imports mpi4py, and this module is imported only if MPI forms a world.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from spark_hvd.transport.mpi.ends import at_exit

if TYPE_CHECKING:
    from mpi4py import MPI as MPI

_NEEDED = "backend='mpi' needs mpi4py and an MPI library; pip install mpi4py mpich"


def _start() -> tuple[Any, bool]:
    """Return mpi4py's module, and whether it was this function that started MPI."""
    theirs = "mpi4py.MPI" in sys.modules
    try:
        import mpi4py

        if not theirs:
            # We start and end MPI ourselves: mpi4py's own finalisation would block forever in a world that has failed.
            mpi4py.rc.initialize = mpi4py.rc.finalize = False
        from mpi4py import MPI as module  # noqa: N811
    except (ImportError, RuntimeError) as error:
        raise ImportError(f"{_NEEDED}. Python says: {error}") from error
    if module.Is_finalized():
        raise RuntimeError("MPI has been finalized in this process, and cannot start again; start a new process.")
    ours = not module.Is_initialized()
    if ours:
        module.Init_thread(module.THREAD_MULTIPLE)
    level = module.Query_thread()
    if level < module.THREAD_SERIALIZED:
        names = {module.THREAD_SINGLE: "MPI_THREAD_SINGLE", module.THREAD_FUNNELED: "MPI_THREAD_FUNNELED"}
        raise RuntimeError(
            f"MPI was started with {names[level]}, but collectives run in several threads; ask for "
            "MPI_THREAD_MULTIPLE, as mpi4py does by itself, or let hvd.init() start MPI."
        )
    return module, ours


if not TYPE_CHECKING:
    MPI, _ours = _start()
else:
    _ours = False

THREADS = MPI.Query_thread() == MPI.THREAD_MULTIPLE
"""Whether several threads may be in MPI at the same time; otherwise they take turns."""


TURNS: AbstractContextManager[Any] = contextlib.nullcontext() if THREADS else threading.RLock()
"""Held during every call of MPI: a lock if MPI admits one thread at a time."""


before_end: list[Callable[[], bool]] = []
"""Called before MPI ends; each returns whether nothing is left in flight."""


def finalize() -> None:
    """Stop polling MPI, and end it if we started it, which blocks until every process does the same.

    MPI is not ended if operations were given up: it would wait for them forever.
    """
    if all([end() for end in before_end]) and _ours and not MPI.Is_finalized():
        MPI.Finalize()


at_exit.append(finalize)
