"""MPI, by way of mpi4py: importing this module starts it, unless the program has done so already.

Nothing else imports mpi4py, and this module is imported only where a world is made by MPI.
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
    """mpi4py's module, and whether it was us who started MPI."""
    theirs = "mpi4py.MPI" in sys.modules
    try:
        import mpi4py

        if not theirs:
            # We start and end MPI ourselves: ending it would block for ever in a world that has failed.
            mpi4py.rc.initialize = mpi4py.rc.finalize = False
        from mpi4py import MPI as module  # noqa: N811
    except (ImportError, RuntimeError) as error:
        raise ImportError(f"{_NEEDED}. What Python says: {error}") from error
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
            "MPI_THREAD_MULTIPLE, as mpi4py does of itself, or let hvd.init() start MPI."
        )
    return module, ours


if not TYPE_CHECKING:
    MPI, _ours = _start()
else:
    _ours = False

THREADS = MPI.Query_thread() == MPI.THREAD_MULTIPLE
"""Whether several threads may be in MPI at the same time; else they take turns."""


TURNS: AbstractContextManager[Any] = contextlib.nullcontext() if THREADS else threading.RLock()
"""Held in every call of MPI: a lock where MPI lets in one thread at a time."""


before_end: list[Callable[[], bool]] = []
"""What ends first; each tells whether nothing is left under way."""


def finalize() -> None:
    """Stop keeping MPI moving, and end it if it was us who started it, which blocks until every process does.

    MPI is not ended where operations were given up: it would wait for ever for what belongs to them.
    """
    if all([end() for end in before_end]) and _ours and not MPI.Is_finalized():
        MPI.Finalize()


at_exit.append(finalize)
