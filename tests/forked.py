"""The fork server of the tests: a process that has torch loaded. Ranks and the fork servers of runs are its forks.

Importing torch takes six seconds of CPU. Each of pytest's processes would do it once for the ranks of its tests, and
once for each environment in which a test starts a run. The server is that of multiprocessing.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import importlib
import multiprocessing
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver, process, resource_tracker
from multiprocessing.connection import Connection, arbitrary_address  # type: ignore[attr-defined]
from multiprocessing.context import ForkServerContext, ForkServerProcess
from types import ModuleType
from typing import Any
from unittest import mock

_SERVER = "SPARK_HVD_TESTS_SERVER"
_SET_BY_LIBRARIES = {  # when torch._dynamo, Lightning, OpenCV, TensorFlow, Keras and scikit-learn are imported
    "TORCHINDUCTOR_CACHE_DIR", "PYTORCH_NVML_BASED_CUDA_CHECK", "LD_LIBRARY_PATH",
    "TF2_BEHAVIOR", "TF_FORCE_GPU_ALLOW_GROWTH", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK",
}  # fmt: skip
_SEEN_BY_FORKS = {"HOME", "SPARK_HVD_PRELOAD", *_SET_BY_LIBRARIES}

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
_set_by_modules: dict[str, str] = {}


def share_server() -> None:
    """Start the server, and let the processes below this one use it."""
    _context()
    server: Any = forkserver._forkserver
    server.ensure_running()
    os.environ[_SERVER] = server._forkserver_address


def fork(target: Callable[..., object], *args: Any, preload: Sequence[str] = ()) -> ForkServerProcess:
    """Run a function in a fork of the server, which starts if no process above has started it.

    The fork has the environment that this process had before any test, and writes where this process writes.

    Args:
        target: The function, which must belong to a module.
        args: Its arguments.
        preload: Modules that take seconds to import. This process has a second server for them, a fork of the first.
    """
    output = [Connection(os.dup(number)) for number in (1, 2)]
    forked = _context().Process(
        target=_run, args=(_environ or {**os.environ}, sys.path, output, target, args), daemon=True
    )
    with _asking(_server_with(tuple(preload))) if preload else contextlib.nullcontext():
        forked.start()
    for stream in output:
        stream.close()
    return forked


class _ServerWith(forkserver.ForkServer):
    """A server that has loaded more modules; it ends with the process that asks it."""

    def __init__(self, modules: Sequence[str]) -> None:
        super().__init__()
        address = arbitrary_address("AF_UNIX")
        alive, self._forkserver_alive_fd = os.pipe()
        with socket.socket(socket.AF_UNIX) as listener, Connection(alive) as watched:
            listener.bind(address)
            listener.listen()
            fork(_load_and_serve, listener, watched, modules)
        self._forkserver_address = address

    def ensure_running(self) -> None:
        resource_tracker.ensure_running()


_server_with = functools.cache(_ServerWith)


def _asking(server: forkserver.ForkServer) -> Any:
    return mock.patch.object(forkserver, "connect_to_new_process", server.connect_to_new_process)


def _load_and_serve(listener: socket.socket, alive: Connection, modules: Sequence[str]) -> None:
    before = {**os.environ}
    for name in modules:
        importlib.import_module(name)
    _set_by_modules.update(item for item in os.environ.items() if item not in before.items())
    forkserver.main(listener.detach(), alive.fileno(), [])


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
    _adopt({**environ, **_set_by_modules}, path)
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
    os.set_inheritable(int(arguments[1]), True)  # a server that begins again executes itself with its arguments
    sys.argv[1:] = arguments
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
