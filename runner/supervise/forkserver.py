"""The fork server: a process with torch imported, from which ranks are forked in milliseconds.

Importing torch takes seconds. A process that has done so can fork ranks at once, and a rank that crashes does not
affect the others. Each Spark executor has one server, which its Python workers share; Spark replaces idle workers after
a minute. The server ends with the executor. (Python's own ``multiprocessing.forkserver`` leaves its children behind if
it loses its parent, and re-imports the parent's ``__main__``, which in a Spark worker is Spark's daemon.)

Run it as ``python -m spark_hvd.runner.supervise.forkserver FOLDER FD ANCHOR LINGER``. FD is a Unix socket that listens
in FOLDER, or the only connection. On a connection, each request arrives as a length with five file descriptors,
followed by a JSON object. When a connection closes, the server kills the ranks requested on it, with their process
groups, so no rank outlives its supervisor. The server ends with process ANCHOR, or after LINGER seconds without a
connection. SPARK_HVD_PRELOAD names modules to import besides torch. SPARK_HVD_IMPORTS, in the environment of a rank,
names modules to import before that rank is forked.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import struct
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import dataclass, field
from typing import Any, NoReturn

import psutil

from spark_hvd.runner.channel.frames import REQUEST_LENGTH, recv_exactly
from spark_hvd.runner.channel.private_sockets import BACKLOG, SocketFolder, is_ours
from spark_hvd.runner.config import IMPORTS, PRELOAD
from spark_hvd.scratch import local_directory, sweep, temporary_directory

_PR_SET_PDEATHSIG = 1
_WATCH_SECONDS = 1.0
_LAST_SECONDS = 5.0
_MOST_BYTES = 8 << 20  # maximum size of a request, which holds an environment and a path
_REQUEST_SECONDS = 30.0  # maximum duration of a request; the server handles one at a time
_FDS = 5


@dataclass(slots=True)
class _Rank:
    status_fd: int
    connection: socket.socket
    temporary: set[str]  # directories of its temporary files, and of its task's


@dataclass(slots=True)
class _ServerLoop:
    """The server's loop, and the descriptors that a forked child must close."""

    listener: socket.socket
    anchor: psutil.Process
    linger: float
    wake: tuple[int, int] = field(default_factory=lambda: os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC))
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    connections: set[socket.socket] = field(default_factory=set)
    ranks: dict[int, _Rank] = field(default_factory=dict)

    def serve(self) -> None:
        """Serve until nobody can need this server any longer."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the client, which then closes the connection
        signal.set_wakeup_fd(self.wake[1])
        if _listens(self.listener):
            self.selector.register(self.listener, selectors.EVENT_READ)
        else:
            self._add(self.listener.dup())
        self.selector.register(self.wake[0], selectors.EVENT_READ)
        wanted_at = time.monotonic()
        while self.anchor.is_running() and self.anchor.status() != psutil.STATUS_ZOMBIE:
            for key, _ in self.selector.select(_WATCH_SECONDS):
                if key.fileobj is self.listener:
                    self._accept()
                elif key.fileobj == self.wake[0]:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self.wake[0], 4096)
                    self._reap()
                elif isinstance(key.fileobj, socket.socket):
                    self._serve_request(key.fileobj)
            if self.connections:
                wanted_at = time.monotonic()
            elif time.monotonic() - wanted_at >= self.linger:
                break
        for connection in list(self.connections):
            self._drop(connection)
        # Killed ranks leave temporary files, which _reap() deletes. A dying rank may still hold our listener open, and
        # a process that tidies up after us would think that we are alive.
        until = time.monotonic() + _LAST_SECONDS
        while self.ranks and time.monotonic() < until:
            self._reap()
            time.sleep(0.01)

    def _accept(self) -> None:
        connection, _ = self.listener.accept()
        if is_ours(connection):
            self._add(connection)
        else:
            connection.close()

    def _add(self, connection: socket.socket) -> None:
        connection.settimeout(_REQUEST_SECONDS)
        self.connections.add(connection)
        self.selector.register(connection, selectors.EVENT_READ)

    def _serve_request(self, connection: socket.socket) -> None:
        request, fds = _receive(connection)
        if request is None:
            self._drop(connection)
            return
        *rank_fds, status_fd = fds
        _import_ahead(request["env"].get(IMPORTS, ""))
        server_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            self.selector.close()
            self.listener.close()
            for other in self.connections:
                other.close()
            for fd in (*self.wake, status_fd, *(rank.status_fd for rank in self.ranks.values())):
                os.close(fd)
            try:
                _become_rank(request, server_pid, *rank_fds)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)  # the child must not continue as the server
        # The parent sets the group as well, before it reports the process, so that whoever kills the group finds it.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.setpgid(pid, pid)
        for fd in rank_fds:
            os.close(fd)
        self.ranks[pid] = _Rank(
            status_fd, connection, {temporary_directory(request["env"]), local_directory(request["env"])}
        )
        _report(status_fd, {"pid": pid})

    def _drop(self, connection: socket.socket) -> None:
        self.selector.unregister(connection)
        self.connections.discard(connection)
        connection.close()
        for pid, rank in self.ranks.items():
            if rank.connection is connection:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)

    def _reap(self) -> None:
        """Report ranks that have ended, and kill the rest of their process groups."""
        while self.ranks:
            # WNOWAIT keeps the zombie, and so its process group's number, until the group has been killed.
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(ended.si_pid, signal.SIGKILL)
            _, status = os.waitpid(ended.si_pid, 0)
            rank = self.ranks.pop(ended.si_pid)
            _report(rank.status_fd, {"exitcode": os.waitstatus_to_exitcode(status)})
            os.close(rank.status_fd)
            for parent in rank.temporary:
                sweep(parent)  # a rank that was killed could not do so itself


def _listens(given: socket.socket) -> bool:
    return bool(given.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _preload() -> None:
    """Import what every rank needs. If torch cannot be loaded, each rank reports that to its driver."""
    # CUDA does not survive a fork, and reads CUDA_VISIBLE_DEVICES when it starts, so it must start in the rank. With
    # this variable, torch can say whether there is a GPU without starting CUDA. Ranks get their own environment.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    import encodings.idna  # noqa: F401  every rank that connects to a host by name would import it

    gc.disable()  # imported objects stay alive, and to visit them again and again takes a tenth of the time
    with contextlib.suppress(Exception):  # broken installations raise OSError, ImportError and others
        import torch

        import spark_hvd.runner.rank.elastic
        import spark_hvd.runner.rank.main
        import spark_hvd.runner.rank.static
        import spark_hvd.torch  # noqa: F401
        from spark_hvd.transport.lookups import without_lookups

        # The first optimizer of a process imports torch._dynamo and sympy, which takes as long as torch itself, and
        # its first use imports the profiler.
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1, device="cpu"))]).zero_grad()
        without_lookups()
    with contextlib.suppress(Exception):
        import pandas  # noqa: F401  pyarrow imports it for its first array, so every rank that gets rows would
    _import_each(os.environ.get(PRELOAD, ""))
    # After a fork, TensorFlow waits for threads that only the parent has, and CUDA raises errors.
    done = "ran operations of TensorFlow" if has_computed() else "started CUDA" if has_started_cuda() else ""
    if done and PRELOAD in os.environ:
        print(f"spark_hvd: {PRELOAD}={os.environ[PRELOAD]} {done}: not imported", file=sys.stderr)
        del os.environ[PRELOAD]
        os.execv(sys.executable, [sys.executable, "-m", __spec__.name, *sys.argv[1:]])
    gc.enable()
    gc.freeze()  # keeps the collector from touching, and so copying, the pages shared with children


def _import_each(names: str) -> None:
    for name in filter(None, names.split(",")):
        with contextlib.suppress(Exception):  # a rank that imports the module raises the error itself
            importlib.import_module(name)


def _import_ahead(names: str) -> None:
    """Import, once, the modules that this rank and later ones would import."""
    if not {*filter(None, names.split(","))} <= sys.modules.keys():
        _import_each(names)
        gc.freeze()


def has_computed() -> bool:
    """Tell, by the names of its threads, whether TensorFlow has run an operation in this process."""
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/comm") as file:
            if file.read().startswith("tf_"):
                return True
    return False


def has_started_cuda(files: str = "/proc/self/fd") -> bool:
    """Tell whether CUDA has started in this process; only CUDA, and not even NVML, opens this device."""
    for number in os.listdir(files):
        with contextlib.suppress(OSError):
            if os.readlink(f"{files}/{number}").startswith("/dev/nvidia-uvm"):
                return True
    return False


def _receive(connection: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """Return the next request; None if it is malformed or the connection has ended, which then must be dropped."""
    fds: list[int] = []
    try:
        prefix, fds, _, _ = socket.recv_fds(connection, REQUEST_LENGTH.size, _FDS)
        (length,) = REQUEST_LENGTH.unpack(prefix)
        body = recv_exactly(connection, length) if length <= _MOST_BYTES and len(fds) == _FDS else None
        if body is not None and isinstance(request := json.loads(bytes(body)), dict):
            return request, list(fds)
    except (OSError, ValueError, struct.error):
        pass
    for fd in fds:
        os.close(fd)
    return None, []


def _become_rank(
    request: dict[str, Any], server_pid: int, control_fd: int, out_fd: int, err_fd: int, stacks_fd: int
) -> NoReturn:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.setpgid(0, 0)  # its own process group, so that the processes that it starts can be killed with it
    _die_with_parent(server_pid)
    os.dup2(out_fd, 1)
    os.dup2(err_fd, 2)
    os.close(out_fd)
    os.close(err_fd)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update(request["env"])
    tempfile.tempdir = None  # forget the server's choice, which depended on its own TMPDIR
    sys.path[:] = request["sys_path"]
    sys.argv[:] = request["argv"]
    os.chdir(request["cwd"])

    from spark_hvd.runner.rank.main import run_rank

    run_rank(socket.socket(fileno=control_fd), stacks_fd)


def _die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent dies."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent died before we could ask
        os._exit(1)


def _report(status_fd: int, message: dict[str, int]) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(status_fd, json.dumps(message).encode() + b"\n")


def main(folder: str, fd: str, anchor: str, linger: str) -> int:
    """Import what ranks need, then serve requests for processes."""
    listener = socket.socket(fileno=int(fd))
    # Since 3.12, Python warns about a fork in a process with threads. The threads of the modules imported here, such as
    # those of jemalloc in pyarrow, can deal with forks.
    warnings.filterwarnings("ignore", r"This process \(pid=\d+\) is multi-threaded", DeprecationWarning)
    if _listens(listener):
        listener.listen(BACKLOG)  # again, because clients see the credentials of the process that called it last
    with listener, contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(int(anchor))
        _preload()
        _ServerLoop(listener, process, float(linger)).serve()
    if folder:
        with contextlib.suppress(OSError), SocketFolder(folder) as ours:
            ours.tidy()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
