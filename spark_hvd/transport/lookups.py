"""Keeps torch's key-value store from asking DNS for the names of the hosts that it connects to."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from spark_hvd.transport.torch_private import TCPStore

_RETRY = 1
"""Index of ``retry`` in glibc's ``struct __res_state``, in ints; resolver(3) lets programs change it."""


def without_lookups() -> None:
    """Keep stores of this process, and of processes forked from it, from looking up peers' names; call it once.

    A TCPStore looks up the name of each address that it connects to, for a line of torch's log. Without a reachable
    server, that takes ten seconds per rank, and five if the server drops one of many queries. Since torch 2.9, a
    process in which a lookup has failed makes no more. So this function makes one fail, in a thread whose resolver
    tries zero times. It does not affect the resolver of other threads, in which users' code runs. It does nothing if
    the C library is not glibc.
    """
    state = getattr(ctypes.CDLL(None), "__res_state", None)
    if state is None:
        return
    with _quiet():
        thread = threading.Thread(target=_fail, args=[state])
        thread.start()
        thread.join()


def _fail(state: Any) -> None:
    ctypes.CDLL(None).__res_init()
    state.restype = ctypes.POINTER(ctypes.c_int)  # of this thread
    state()[_RETRY] = 0
    with contextlib.suppress(RuntimeError):  # without a loopback interface, ranks do look names up
        TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=10), wait_for_workers=False)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide what torch logs about the failure, which would alarm readers of an executor's log."""
    sys.stderr.flush()
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
