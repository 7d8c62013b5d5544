"""The fork server of the tests: a process that has torch loaded. Ranks and the fork servers of runs are its forks.

Importing torch takes six seconds of CPU. Each of pytest's processes would do it once for the ranks of its tests, and
once for each environment in which a test starts a run. The server is that of multiprocessing.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver, process, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from types import ModuleType
from typing import Any

_SERVER = "SPARK_HVD_TESTS_SERVER"
_SEEN_BY_FORKS = {"HOME", "TORCHINDUCTOR_CACHE_DIR"}  # torch._dynamo sets the latter when it is imported

# Modules that many ranks import. The first optimizer of a process imports torch._dynamo: two seconds of CPU.
# Test functions import pytest, a fifth of a second, if they contain an assert.
_LOADED = [
    "spark_hvd.torch",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "pandas",
    "pytest",
    "tests.stores",
    "tests.ranks",
    "tests.frozen",  # last
]

_PROGRAM = process.current_process()  # in a fork, that of the server
_environ: dict[str, str] = {}


def share_server() -> None:
    """Start the server, and let the processes below this one use it."""
    _context()
    server: Any = forkserver._forkserver
    server.ensure_running()
    os.environ[_SERVER] = server._forkserver_address


def fork(target: Callable[..., object], *args: Any) -> ForkServerProcess:
    """Run a function in a fork of the server, which starts if no process above has started it.

    The fork has the environment that this process had before any test, and writes where this process writes.
    """
    output = [Connection(os.dup(number)) for number in (1, 2)]
    forked = _context().Process(
        target=_run, args=(_environ or {**os.environ}, sys.path, output, target, args), daemon=True
    )
    forked.start()
    for stream in output:
        stream.close()
    return forked


def fork_run_servers() -> None:
    """Let runs of this process use forks as fork servers, unless variables differ that libraries read early.

    A test finds the real function by ``inspect.unwrap``.
    """
    from spark_hvd.runner.supervise import processes

    _environ.update(os.environ)
    starts, before = processes._start, processes._read_at_load({**os.environ})

    @functools.wraps(starts)
    def start(
        of: processes.Interpreter, folder: str, given: Any, env: Mapping[str, str | None], anchor: int, linger: float
    ) -> None:
        environ = processes.apply_env(of.environ, env)
        now = processes._read_at_load({**environ})
        differ = (name for name in {*before, *now} - _SEEN_BY_FORKS if before.get(name) != now.get(name))
        if of.executable != sys.executable or not all(name.startswith("PYTHON") for name in differ):
            starts(of, folder, given, env, anchor, linger)
            return
        path = [os.path.abspath(entry) for entry in of.path if entry]
        fork(_serve_runs, environ, path, given, folder, str(anchor), str(linger))

    replaced: Any = processes
    replaced._start = start


def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_LOADED)
    server: Any = forkserver._forkserver
    if server._forkserver_address is None and _SERVER in os.environ:
        server._forkserver_address = os.environ[_SERVER]
        server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        server.ensure_running = resource_tracker.ensure_running
    return context


def _run(
    environ: dict[str, str], path: list[str], output: list[Connection], target: Callable[..., object], args: Any
) -> None:
    for number, stream in enumerate(output, 1):
        os.dup2(stream.fileno(), number)
        stream.close()
    _adopt(environ, path)
    target(*args)


def _adopt(environ: Mapping[str, str], path: Sequence[str]) -> None:
    """Give this fork another environment, and folders that it searches first for modules."""
    os.environ.clear()
    os.environ.update(environ)
    sys.path[:] = [*path, *(folder for folder in sys.path if folder not in path)]
    tempfile.tempdir = None


def _serve_runs(environ: dict[str, str], path: list[str], given: Any, folder: str, anchor: str, linger: str) -> None:
    """Act as a run's fork server, as if this fork were a program: a parent without multiprocessing so far."""
    from spark_hvd.runner.supervise import forkserver as of_runs

    _adopt({**environ, "PYTHONPATH": os.pathsep.join(path)}, path)
    os.setsid()
    os.chdir("/")
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), 1)
    arguments = [folder, str(given.detach()), anchor, linger]
    _show_as([sys.executable, "-m", of_runs.__name__, *arguments])
    multiprocessing.set_start_method(None, force=True)
    of_process: Any = process
    of_process._current_process = _PROGRAM
    of_process._parent_process = None
    tracker: Any = resource_tracker._resource_tracker
    tracker._fd = None
    server: Any = forkserver._forkserver
    server._forkserver_address = server._forkserver_alive_fd = server._inherited_fds = None
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        sys.exit(of_runs.main(*arguments))
    finally:
        atexit._run_exitfuncs()


def _show_as(command: Sequence[str]) -> None:
    """Let this fork have another command line, by which tests find it."""
    with open("/proc/self/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    first, text = command[0].encode(), "\0".join(command).encode() + b"\0"
    assert len(text) <= end - start, f"{command} is longer than the command line of the server"
    ctypes.memmove(start, first + b" " * (end - start - len(text)) + text[len(first) :], end - start)
