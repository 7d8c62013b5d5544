"""The process that a rank is: torch and fn are taken up in it, fn is called, and it ends."""

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
"""Modules whose frames above fn, or above a script, are no part of the user's program."""


_MOST_OF_A_MESSAGE, _MOST_OF_A_TRACEBACK = 16 << 10, 256 << 10
"""Characters that are told of an exception: nobody reads more, and a driver takes a minute over 20 million."""


class SetupFailure(Exception):  # noqa: N818  users see a SetupError or the cause, never this
    """The rank could not get as far as calling fn."""

    def __init__(self, message: str, cause: BaseException) -> None:
        super().__init__(message)
        self.cause = cause


def check_torch() -> None:
    """Import torch, with as many threads as this rank's environment says; TensorFlow will have so many, too.

    Raises:
        SetupFailure: there is none, or it cannot be loaded.
    """
    try:
        import torch
    except Exception as error:  # OSError where a shared library is missing, and others of broken installs
        raise SetupFailure(
            f"torch cannot be imported by {sys.executable} (Python {sys.version.split()[0]}): {one_line(error)}. "
            "Install it in that Python on every executor, or point PYSPARK_PYTHON at one that has it.",
            error,
        ) from error
    # The fork server read OMP_NUM_THREADS when it started; this rank's environment may say otherwise.
    if (threads := read_threads()) is not None:
        if threads != torch.get_num_threads():
            torch.set_num_threads(threads)
        share_cores(threads)


class RandomState:
    """Seeds of this process's libraries: every rank draws its own numbers, others in each run, unless that has a seed.

    A rank is forked, and would go on with the generators of the process it is forked from: the same on all ranks, and
    the same again in the next run. ``seed`` is the run's; None: a state that nothing else has. No other rank of the run
    has had the ``stream`` of the seed.
    """

    def __init__(self, seed: int | None, stream: int) -> None:
        self._root = secrets.token_bytes(32) if seed is None else f"{seed}/{stream}".encode()
        self._seeded: set[str] = set()

    def start(self) -> None:
        """Seed Python's generator, and those of the libraries imported so far. What was seeded before is left alone."""
        for name, seed in _SEEDERS.items():
            if name in sys.modules and name not in self._seeded:
                seed(importlib.import_module(name), hashlib.sha256(self._root + b"/" + name.encode()).digest())
                self._seeded.add(name)


def _numpy(numpy: Any, drawn: bytes) -> None:
    numpy.random.seed([int.from_bytes(drawn[at : at + 4], "big") for at in range(0, len(drawn), 4)])


def _torch(torch: Any, drawn: bytes) -> None:
    torch.manual_seed(
        int.from_bytes(drawn[:8], "big") >> 1
    )  # CUDA, which has not been started, takes it over when it is


def _tensorflow(tensorflow: Any, drawn: bytes) -> None:
    tensorflow.random.set_seed(int.from_bytes(drawn[:4], "big") >> 1)


_SEEDERS: dict[str, Callable[[Any, bytes], None]] = {
    "random": lambda _, drawn: random.seed(drawn),  # Keras draws the seeds of its layers from it
    "numpy": _numpy,
    "torch": _torch,
    "tensorflow": _tensorflow,
}


def unpickle_call(
    payload: bytes | memoryview, state: RandomState
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Fn with its arguments, and random state of this rank's own for it and the modules that it needs.

    Raises:
        SetupFailure: something that it needs is missing here.
    """
    from spark_hvd.world.pickles import send_by_value

    send_by_value()
    state.start()  # modules may draw while they are imported
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
    """Call fn, and finish what it has left under way.

    A process that it forks, and that comes out of it, ends here as a program does: it is not the rank.
    """
    from spark_hvd.context import leave  # not above: this module is there before torch is known to be

    rank = os.getpid()
    try:
        value = fn(*args, **kwargs)
        if os.getpid() == rank:
            leave.finish()
        return value
    except BaseException:
        if os.getpid() == rank:
            with contextlib.suppress(Exception):  # what fn raised is the one to tell
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
        os._exit(1)  # whatever fails here, or the child would continue as the rank


def exit_code(code: object) -> int:
    """The exit code that Python itself would make of ``sys.exit(code)``; text is written to stderr."""
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    with contextlib.suppress(Exception):  # stderr may be closed
        print(code, file=sys.stderr, flush=True)
    return 1


def format_error(error: BaseException) -> str:
    """The traceback from fn on, without our frames above it."""
    trace = error.__traceback__
    while trace is not None and _OURS.match(trace.tb_frame.f_globals.get("__name__") or ""):
        trace = trace.tb_next
    if trace is None:
        trace = error.__traceback__
    return bounded("".join(traceback.format_exception(type(error), error, trace)), _MOST_OF_A_TRACEBACK)


def one_line(error: BaseException) -> str:
    """What is raised, without where and without its notes."""
    told = traceback.TracebackException(type(error), error, None)
    told.__notes__ = None  # type: ignore[attr-defined] # they come last, and the traceback has them
    *_, line = told.format_exception_only()
    return bounded(line.strip(), _MOST_OF_A_MESSAGE)


def end_process(code: int) -> NoReturn:
    """End as a forked process does (see multiprocessing): exit handlers run, the torn-down interpreter is spared.

    Taking torch apart object by object costs a third of a second, in which the caller would wait for nothing.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    # torch's libraries of operators would be unregistered one by one, which takes 40 ms a rank.
    for each in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        if (found := each.peek()) is not None and getattr(found[1], "__module__", None) == "torch.library":
            each.atexit = False
    atexit._run_exitfuncs()
    flush_output()
    os._exit(code & 0xFF)  # as sys.exit does with larger numbers


def flush_output() -> None:
    """Flush the output. A program may have closed its streams, or replaced them by others or by None."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
