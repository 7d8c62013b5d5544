"""Keeps torch's key-value store from asking the DNS for the names of the hosts that it connects to."""

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
"""The place of ``retry`` in glibc's ``struct __res_state``, in ints; resolver(3) lets programs change it."""


def without_lookups() -> None:
    """Let no store of this process, nor of those forked from it, look up the names of its peers; call it once.

    A TCPStore wants the name of each address that it connects to, for a line of torch's log. Where no server answers,
    that takes ten seconds a rank, and five where it has lost one of many questions at once. From torch 2.9 on a
    process in which a look-up has failed makes no other: so this has one fail, in a thread whose resolver is to try
    zero times. The resolver of other threads, and so of users' code, is not touched. Does nothing where the C
    library is not glibc.
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
    with contextlib.suppress(RuntimeError):  # this host has no loopback interface: ranks look names up, then
        TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=10), wait_for_workers=False)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What torch logs of the failure would alarm whoever reads an executor's log."""
    sys.stderr.flush()
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
