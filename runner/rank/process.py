"""The steps of a rank's process: it checks torch, seeds random numbers, unpickles fn, calls it, and exits."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import importlib
import os
import pickle
import random
import re
import secrets
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

from spark_hvd.world.env import read_threads, share_cores
from spark_hvd.world.words import bounded

_OURS = re.compile(r"spark_hvd\.runner\.|runpy$")
"""Modules whose frames above fn, or above a script, do not belong to the user's program."""


_MAX_MESSAGE_CHARS, _MAX_TRACEBACK_CHARS = 16 << 10, 256 << 10
"""Limits for the text of an exception: nobody reads more, and a driver needs a minute for 20 million characters."""


class SetupFailure(Exception):  # noqa: N818  users see a SetupError or the cause, never this
    """The rank failed before it could call fn."""

    def __init__(self, message: str, cause: BaseException) -> None:
        super().__init__(message)
        self.cause = cause


def check_torch() -> None:
    """Import torch, and give it and TensorFlow the number of threads that this rank's environment names.

    Raises:
        SetupFailure: torch is missing or cannot be loaded.
    """
    try:
        import torch
    except Exception as error:  # broken installations raise OSError, ImportError and others
        raise SetupFailure(
            f"torch cannot be imported by {sys.executable} (Python {sys.version.split()[0]}): {one_line(error)}. "
            "Install it in that Python on every executor, or point PYSPARK_PYTHON at one that has it.",
            error,
        ) from error
    # The fork server read OMP_NUM_THREADS when it started; this rank's environment may have another value.
    if (threads := read_threads()) is not None:
        if threads != torch.get_num_threads():
            torch.set_num_threads(threads)
        share_cores(threads)


class RandomState:
    """Seeds the random number generators of this process's libraries, differently on every rank.

    A rank is forked and would otherwise inherit the state of the fork server's generators, which is the same on all
    ranks and in the next run. ``seed`` is the run's; None means other numbers in each run. ``stream`` is a number that
    no other rank of the run has ever had.
    """

    def __init__(self, seed: int | None, stream: int) -> None:
        self._root = secrets.token_bytes(32) if seed is None else f"{seed}/{stream}".encode()
        self._seeded: set[str] = set()

    def start(self) -> None:
        """Seed Python's generator and those of the libraries imported so far, unless they have been seeded before."""
        for name, seed in _SEEDERS.items():
            if name in sys.modules and name not in self._seeded:
                seed(importlib.import_module(name), hashlib.sha256(self._root + b"/" + name.encode()).digest())
                self._seeded.add(name)


def _numpy(numpy: Any, drawn: bytes) -> None:
    numpy.random.seed([int.from_bytes(drawn[at : at + 4], "big") for at in range(0, len(drawn), 4)])


def _torch(torch: Any, drawn: bytes) -> None:
    torch.manual_seed(int.from_bytes(drawn[:8], "big") >> 1)  # also seeds CUDA once it starts


def _tensorflow(tensorflow: Any, drawn: bytes) -> None:
    tensorflow.random.set_seed(int.from_bytes(drawn[:4], "big") >> 1)


_SEEDERS: dict[str, Callable[[Any, bytes], None]] = {
    "random": lambda _, drawn: random.seed(drawn),  # Keras takes the seeds of its layers from this generator
    "numpy": _numpy,
    "torch": _torch,
    "tensorflow": _tensorflow,
}


def unpickle_call(
    payload: bytes | memoryview, state: RandomState
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Unpickle fn and its arguments, and seed this rank's generators for fn and the modules that it imports.

    Raises:
        SetupFailure: fn cannot be unpickled, perhaps because a module is missing here.
    """
    from spark_hvd.world.pickles import send_by_value

    send_by_value()
    state.start()  # modules may draw random numbers while they are imported
    try:
        fn, args, kwargs = pickle.loads(payload)
    except Exception as error:
        raise SetupFailure(
            f"fn could not be unpickled by {sys.executable} (Python {sys.version.split()[0]}): {one_line(error)}. "
            "If a module of yours is missing there, ship it with spark-submit --py-files or "
            'spark.addArtifact("x.py", pyfile=True).',
            error,
        ) from error
    state.start()
    return fn, args, kwargs


def call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call fn, and finish the collectives that it has left unfinished.

    If fn forks a process that returns from it, that process exits here like a program, because it is not the rank.
    """
    from spark_hvd.context import leave  # imports torch, which check_torch() must do first

    rank = os.getpid()
    try:
        value = fn(*args, **kwargs)
        if os.getpid() == rank:
            leave.finish()
        return value
    except BaseException:
        if os.getpid() == rank:
            with contextlib.suppress(Exception):  # fn's exception is the one to report
                leave.finish()
        raise
    finally:
        if os.getpid() != rank:
            _end_fork(sys.exc_info()[1])


def _end_fork(error: BaseException | None) -> NoReturn:
    try:
        if isinstance(error, SystemExit):
            end_process(exit_code(error.code))
        if error is not None:
            sys.stderr.write(format_error(error))
        end_process(int(error is not None))
    finally:
        os._exit(1)  # even if something fails here, the child must not continue as the rank


def exit_code(code: object) -> int:
    """Return the exit code that Python makes of ``sys.exit(code)``; like Python, print a text to stderr."""
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    with contextlib.suppress(Exception):  # stderr may be closed
        print(code, file=sys.stderr, flush=True)
    return 1


def format_error(error: BaseException) -> str:
    """Return the traceback from fn on, without our frames above it."""
    trace = error.__traceback__
    while trace is not None and _OURS.match(trace.tb_frame.f_globals.get("__name__") or ""):
        trace = trace.tb_next
    if trace is None:
        trace = error.__traceback__
    return bounded("".join(traceback.format_exception(type(error), error, trace)), _MAX_TRACEBACK_CHARS)


def one_line(error: BaseException) -> str:
    """Return the last line of an exception's traceback: its class and text, without its notes."""
    exception = traceback.TracebackException(type(error), error, None)
    exception.__notes__ = None  # type: ignore[attr-defined] # notes would follow that line, and the traceback has them
    *_, line = exception.format_exception_only()
    return bounded(line.strip(), _MAX_MESSAGE_CHARS)


def end_process(code: int) -> NoReturn:
    """End like a forked process (see multiprocessing): run exit handlers, but do not finalize the interpreter.

    To destroy torch's objects one by one would take a third of a second, for which the caller would wait in vain.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    # Skip the handlers that unregister torch's operator libraries one by one, which takes 40 ms.
    for each in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        if (found := each.peek()) is not None and getattr(found[1], "__module__", None) == "torch.library":
            each.atexit = False
    atexit._run_exitfuncs()
    flush_output()
    os._exit(code & 0xFF)  # sys.exit also keeps only the lowest byte


def flush_output() -> None:
    """Flush stdout and stderr, which the program may have closed or replaced, even by None."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
