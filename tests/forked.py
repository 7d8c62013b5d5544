"""One process that has torch loaded, of which ranks, fork servers, Spark's daemons and pytest's processes are forks.

Importing torch takes six seconds of CPU, and a run of the tests would do it for each of these processes. The server is
that of multiprocessing. It ends with the process that has started it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import importlib
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver, process, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from types import ModuleType
from typing import Any, NoReturn

_SERVER = "SPARK_HVD_TESTS_SERVER"
_SEEN_BY_FORKS = {"HOME", "SPARK_HVD_PRELOAD"}  # and those of Python itself, or so far as it matters to tests

# What many ranks would import. The first optimizer of a process imports torch._dynamo: two seconds of CPU.
# Functions of tests import pytest, a fifth of a second, if they assert anything.
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

_DESCRIPTORS = ["PMI_FD"]  # variables that tell a program which files are open for it
_PROGRAM = process.current_process()  # in a fork, that of the server
_environ: dict[str, str] = {}


def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_LOADED)
    server: Any = forkserver._forkserver
    if server._forkserver_address is None and _SERVER in os.environ:
        server._forkserver_address = os.environ[_SERVER]
        server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        server.ensure_running = resource_tracker.ensure_running
    return context


def fork(target: Callable[..., object], *args: Any) -> ForkServerProcess:
    """Run a function in a fork of the one server, which starts if no process above has started it.

    The fork has the environment that this process had when it called this for the first time, and its output goes to
    where that of this process goes.
    """
    if not _environ:
        _environ.update(os.environ)
    output = [Connection(os.dup(number)) for number in (1, 2)]
    forked = _context().Process(target=_run, args=(_environ, sys.path, output, target, args), daemon=True)
    forked.start()
    for stream in output:
        stream.close()
    return forked


def share_server() -> None:
    """Start the server if there is none, and let the processes below use it."""
    _context()
    server: Any = forkserver._forkserver
    server.ensure_running()
    os.environ[_SERVER] = server._forkserver_address


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


def _show_as(command: Sequence[str]) -> None:
    """Let this fork have another command line, by which tests find it."""
    with open("/proc/self/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    text = "\0".join(command).encode() + b"\0"
    padding = b" " * (end - start - len(text))
    ctypes.memmove(start, command[0].encode() + padding + text[len(command[0].encode()) :], end - start)


def fork_run_servers() -> None:
    """Let runs of this process have fork servers that are forks, if no variable differs that libraries read early."""
    from spark_hvd.runner.supervise import processes

    if hasattr(processes._start, "__wrapped__"):
        return
    starts, before = processes._start, processes._read_at_load({**os.environ})

    @functools.wraps(starts)  # by which a test finds the real one
    def start(
        of: processes.Interpreter, folder: str, given: Any, env: Mapping[str, str | None], anchor: int, linger: float
    ) -> None:
        environ = processes.apply_env(of.environ, env)
        now = processes._read_at_load({**environ})
        if of.executable != sys.executable or any(
            before.get(name) != now.get(name)
            for name in {*before, *now} - _SEEN_BY_FORKS
            if not name.startswith("PYTHON")
        ):
            starts(of, folder, given, env, anchor, linger)
            return
        path = [os.path.abspath(entry) for entry in of.path if entry]
        arguments = [folder, str(anchor), str(linger)]
        fork(_as_program, _serve_runs, environ, path, given, *arguments)

    replaced: Any = processes
    replaced._start = start


def _serve_runs(environ: dict[str, str], path: list[str], given: Any, folder: str, anchor: str, linger: str) -> None:
    _adopt({**environ, "PYTHONPATH": os.pathsep.join(path)}, path)
    os.setsid()
    os.chdir("/")
    arguments = [folder, str(given.detach()), anchor, linger]
    _show_as([sys.executable, "-m", "spark_hvd.runner.supervise.forkserver", *arguments])
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), 1)
    from spark_hvd.runner.supervise import forkserver

    sys.exit(forkserver.main(*arguments))


def _as_program(target: Callable[..., object], *args: Any) -> None:
    """Call a function as if this fork were a program of its own: a parent, whose multiprocessing has not begun."""
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
        target(*args)
    except SystemExit:
        raise
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()


def python(*arguments: str) -> list[str]:
    """The command of Python with these arguments, for a program that would import torch: it is a fork."""
    share_server()
    return [sys.executable, __file__, *arguments]


def _stand_in(target: Callable[..., object], *args: Any) -> NoReturn:
    """Have a fork do what this program was started for, with its open files, and end as it does."""
    tracker: Any = resource_tracker._resource_tracker
    tracker._fd = os.open(os.devnull, os.O_WRONLY)  # or one would be started
    sys.modules["__main__"] = ModuleType("__main__")  # or the fork would run this one
    numbers = [0, *(int(os.environ[name]) for name in _DESCRIPTORS if name in os.environ)]
    files = [Connection(os.dup(number)) for number in numbers]
    forked = fork(_stood_in_for, files, os.getcwd(), sys.orig_argv, target, *args)
    forked.join()
    if (code := forked.exitcode or 0) < 0:
        with contextlib.suppress(OSError):  # of SIGKILL
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _stood_in_for(files: list[Connection], folder: str, command: list[str], *call: Any) -> None:
    _show_as(command)
    parent: Any = multiprocessing.parent_process()
    fcntl.fcntl(parent.sentinel, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(parent.sentinel, fcntl.F_SETSIG, signal.SIGTERM)  # when the program ends
    fcntl.fcntl(parent.sentinel, fcntl.F_SETFL, fcntl.fcntl(parent.sentinel, fcntl.F_GETFL) | fcntl.FASYNC)
    os.chdir(folder)
    os.dup2(files[0].fileno(), 0)
    for name, file in zip((name for name in _DESCRIPTORS if name in os.environ), files[1:], strict=True):
        os.environ[name] = str(os.dup(file.fileno()))
        os.set_inheritable(int(os.environ[name]), True)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    _as_program(*call)


def _serve_spark(jvm: int) -> None:
    from tests.warm_daemon import main

    for name in ("spark_hvd.runner.supervise.task", "spark_hvd.runner.elastic.task"):
        vars(importlib.import_module(name))["executor_pid"] = lambda: jvm  # which is not above this process
    main()


def _execute(arguments: list[str]) -> None:
    """As Python does with these arguments."""
    fork_run_servers()
    main = vars(sys.modules["__main__"])
    if "-c" in arguments:
        at = arguments.index("-c")
        sys.path.insert(0, "")
        sys.argv = ["-c", *arguments[at + 2 :]]
        exec(arguments[at + 1], main)
    elif arguments[0] == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


def stand_in() -> None:
    """Be Spark's daemon, or what the arguments say."""
    is_daemon = sys.argv[1:2] in ([], ["pyspark.worker"])
    if is_daemon and _SERVER not in os.environ:
        from tests.warm_daemon import main

        main()
    elif is_daemon:
        _stand_in(_serve_spark, os.getppid())
    else:
        _stand_in(_execute, sys.argv[1:])


if __name__ == "__main__":
    if not __package__:
        sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    importlib.import_module("tests.forked").stand_in()
