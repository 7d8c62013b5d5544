"""The client of the fork server, which starts rank processes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import platform
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from weakref import WeakValueDictionary

import psutil

from spark_hvd.runner.channel.frames import REQUEST_LENGTH, STACKS_SIGNAL
from spark_hvd.runner.channel.private_sockets import SocketFolder, is_ours, namespaces
from spark_hvd.runner.config import PRELOAD

_log = logging.getLogger(__name__)
_STACKS_PAUSE = 0.1  # stacks are complete once nothing has been written for this many seconds
_KEPT = 2  # a server holds ~300 MB; two, so that alternating between two environments stays fast
_LINGER = 600.0  # seconds that the server of the common environment waits for another run
_READ_AT_LOAD = re.compile(
    # threads, allocators, the dynamic loader, Python, locale; then what frameworks read when they are imported
    r"(OMP|GOMP|KMP|MKL|DNNL|ONEDNN|OPENBLAS|BLIS|GOTO|NUMEXPR|NPY|NUMPY|MALLOC|GLIBC|JE|MIMALLOC|ARROW|LD|PYTHON|LC)_?.*"
    r"|LANG|TZ|HOME|(TORCH|PYTORCH|AOT|TRITON|TF|XLA|GRPC|ABSL|KERAS|JAX).*|" + PRELOAD
)
"""Variables that libraries read when they are loaded, which happens in the server. Ranks get the others after the
fork."""


@dataclass(slots=True)
class RankProcess:
    """A running rank, and this process's ends of its pipes."""

    pid: int
    control: socket.socket
    stdout_fd: int
    stderr_fd: int
    stacks_fd: int
    status_fd: int
    server: ForkServer
    orphaned: bool = False
    """Whether the rank ended because its fork server was killed. Known only with the exit code."""

    def signal_group(self, signum: signal.Signals) -> None:
        """Send a signal to the rank and to every process that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signum)

    def ask_for_stacks(self) -> None:
        """Let the rank, but not its child processes, write its stacks. It keeps running."""
        self.clear_stacks()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, STACKS_SIGNAL)

    def kill(self) -> int:
        """Kill the rank and its child processes, and return its exit code. Call it once."""
        self.signal_group(signal.SIGKILL)
        return self.exit_code()

    def exit_code(self) -> int:
        """Wait for the end of the rank, and return its exit code. Call it once."""
        if data := os.read(self.status_fd, 256):
            return int(json.loads(data)["exitcode"])
        # The fork server itself was killed, and the kernel has killed the rank along with it.
        self.orphaned = True
        self.signal_group(signal.SIGKILL)
        return -signal.SIGKILL

    def clear_stacks(self) -> None:
        """Delete the stacks that the fault handler has written."""
        os.ftruncate(self.stacks_fd, 0)
        os.lseek(self.stacks_fd, 0, os.SEEK_SET)  # the rank writes through the same open file

    def await_stacks(self, timeout: float, meanwhile: Callable[[float], object] = time.sleep) -> str:
        """Ask for the stacks, and wait until those of all threads are complete.

        ``meanwhile`` is called repeatedly, with seconds to wait. After ``timeout`` seconds, incomplete stacks are
        returned.
        """
        self.ask_for_stacks()
        text, grown = "", time.monotonic()
        deadline = grown + timeout
        while (now := time.monotonic()) < deadline and not (text and now - grown > _STACKS_PAUSE):
            meanwhile(_STACKS_PAUSE / 2)
            if (more := self.stacks()) != text:
                text, grown = more, time.monotonic()
        return text

    def stacks(self) -> str:
        """Return the Python stacks of the rank's threads, as its fault handler has written them."""
        return os.pread(self.stacks_fd, 1 << 16, 0).decode(errors="replace")

    def close(self) -> None:
        """Close our ends of the pipes, after the process has ended."""
        self.control.close()
        for fd in (self.stdout_fd, self.stderr_fd, self.stacks_fd, self.status_fd):
            os.close(fd)


class ForkServerError(RuntimeError):
    """The fork server has ended, or did not start; the next run starts another."""


class ForkServer:
    """A connection to a fork server (see :mod:`spark_hvd.runner.supervise.forkserver`).

    It is closed at the latest when nobody refers to it any more; ranks do.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._lock = threading.Lock()  # held for a complete request, so that requests do not mix
        self._socket = connection

    def __del__(self) -> None:
        self.close()

    @property
    def alive(self) -> bool:
        """Whether the server can still fork."""
        # The server never writes here, so the socket becomes readable only when the server ends.
        return not readable([self._socket.fileno()], 0)

    def spawn(self, env: Mapping[str, str], timeout: float) -> RankProcess:
        """Fork a rank process, which then waits for its first frame on ``control``.

        ``env`` is the rank's complete environment. ``timeout`` is the number of seconds to wait for a server that may
        still be importing torch.

        Raises:
            ForkServerError: The server ended, or did not answer in time.
        """
        request = {"env": dict(env), "sys_path": sys.path, "argv": sys.argv[:1], "cwd": os.getcwd()}
        with ExitStack() as ours, ExitStack() as theirs:  # ours stay open if the fork succeeds
            try:
                control, child_control = socket.socketpair()
                ours.callback(control.close)
                theirs.callback(child_control.close)
                out_read, out_write = _pipe(ours, theirs)
                err_read, err_write = _pipe(ours, theirs)
                status_read, status_write = _pipe(ours, theirs)
                with tempfile.TemporaryFile() as file:  # has no name, so it disappears with its last descriptor
                    stacks = os.dup(file.fileno())
                ours.callback(os.close, stacks)
                given = (child_control.fileno(), out_write, err_write, stacks, status_write)
                with self._lock:
                    pid = self._ask(request, given, status_read, timeout)
            except (OSError, ForkServerError) as error:
                raise ForkServerError(
                    f"the fork server of {sys.executable} did not start a process: {error}. "
                    "The Spark executor's log has the server's own error, if there is one."
                ) from error
            ours.pop_all()
        return RankProcess(pid, control, out_read, err_read, stacks, status_read, self)

    def _ask(self, request: Mapping[str, object], fds: tuple[int, ...], status_fd: int, timeout: float) -> int:
        body = json.dumps(request).encode()
        socket.send_fds(self._socket, [REQUEST_LENGTH.pack(len(body))], fds)
        self._socket.sendall(body)
        ready = readable([status_fd, self._socket.fileno()], timeout)
        if not ready:
            raise ForkServerError(f"no answer in {timeout:.0f} s")
        if self._socket.fileno() in ready:
            raise ForkServerError("it has ended")
        pid: int = json.loads(_read_line(status_fd))["pid"]
        return pid

    def close(self) -> None:
        """Close the connection; the server then kills the ranks that were forked on it."""
        self._socket.close()


def readable(fds: Sequence[int], timeout: float) -> set[int]:
    """Wait up to ``timeout`` seconds for descriptors to become readable or to end, and return those that have.

    Unlike ``select``, it takes descriptors of any number.
    """
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    return {fd for fd, _ in poller.poll(timeout * 1000)}


def _pipe(ours: ExitStack, theirs: ExitStack) -> tuple[int, int]:
    read, write = os.pipe()
    ours.callback(os.close, read)
    theirs.callback(os.close, write)
    return read, write


def _read_line(fd: int) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(fd, 1)
        if not byte:
            raise ForkServerError("it closed the pipe")
        line += byte
    return line


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python interpreter with the settings that determine which torch it imports.

    Attributes:
        executable: Path of the program.
        environ: Its complete environment.
        path: Folders in which it looks for modules, with or without its own.
    """

    executable: str
    environ: Mapping[str, str]
    path: Sequence[str]


_servers: WeakValueDictionary[frozenset[tuple[str, str | None]], ForkServer] = WeakValueDictionary()
_latest: deque[ForkServer] = deque(maxlen=_KEPT)  # keeps the last ones for the next runs
_servers_lock = threading.Lock()  # held until a server has started, so that two runs share one
_started: list[subprocess.Popen[bytes]] = []


def fork_server(env: Mapping[str, str | None], anchor: int) -> ForkServer:
    """Return the fork server for a run's changes to the environment, and start it if there is none.

    The server itself needs only the changes that libraries read when they load. Every rank gets its complete
    environment, so the other changes reach it from any server.

    Args:
        env: Changes to this process's environment. A server with such changes ends with its last client. A server
            without any, or only with modules to import, waits ten minutes for another run.
        anchor: The process with which the server ends: the Spark executor, or this one. Processes with the same anchor,
            environment and Python share a server.
    """
    check_system()
    env = _read_at_load(env)
    key = frozenset(env.items())
    with _servers_lock:
        server = _servers.get(key)
        if server is not None and server in _latest:
            _latest.remove(server)
        if server is None or not server.alive:
            server = _servers[key] = ForkServer(_connect(env, anchor))
        _latest.append(server)
    return server


def fork_server_of(python: Interpreter, env: Mapping[str, str | None], anchor: int) -> ForkServer | None:
    """Return the fork server that processes of another Python will use, and start it if there is none.

    The server imports torch while those processes start. It stays at least until the returned connection is closed.
    ``env`` and ``anchor`` are the arguments that the processes will pass to :func:`fork_server`.

    Returns:
        The server; None if servers cannot be shared on this machine.
    """
    check_system()
    try:
        return ForkServer(_connect_to_shared(python, _read_at_load(env), anchor))
    except OSError as error:
        _log.debug("no fork server to share: %s", error)
        return None


def outlives_runs(env: Mapping[str, str | None]) -> bool:
    """Tell whether the server of a run with such changes to the environment waits for another run."""
    return not _read_at_load(env).keys() - {PRELOAD}


def _read_at_load(env: Mapping[str, str | None]) -> dict[str, str | None]:
    return {name: value for name, value in env.items() if _READ_AT_LOAD.fullmatch(name)}


def check_system() -> None:
    """Check that ranks can run on this machine. A driver can run on any system.

    Raises:
        ForkServerError: This machine does not run Linux.
    """
    if platform.system() != "Linux":
        raise ForkServerError(
            f"ranks need Linux, this is {platform.system()}: run in a Linux container, or connect to a cluster of "
            "Linux hosts, for which this machine can be the driver"
        )


def apply_env(base: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    """Return ``base`` with ``changes``; a change to None removes the variable."""
    env = {**base, **changes}
    return {key: value for key, value in env.items() if value is not None}


def _connect(env: Mapping[str, str | None], anchor: int) -> socket.socket:
    python = Interpreter(sys.executable, os.environ, sys.path)
    try:
        return _connect_to_shared(python, env, anchor)
    except OSError as error:
        _log.warning("This process cannot share a fork server with others, so it starts its own: %s", error)
    connection, given = socket.socketpair()
    with given:
        _start(python, "", given, env, anchor, 0.0)
    return connection


def _connect_to_shared(python: Interpreter, env: Mapping[str, str | None], anchor: int) -> socket.socket:
    with SocketFolder.named(f"spark_hvd-{os.geteuid()}") as folder:
        name = _name(python, env, anchor)
        connection = folder.connect(name)
        if connection is None:
            with folder.listen(name) as listener:  # connections now wait until the server has imported torch
                folder.tidy()  # remove the sockets of servers that were killed
                _start(python, folder.path, listener, env, anchor, 0.0 if env.keys() - {PRELOAD} else _LINGER)
                connection = folder.connect(name)
        if connection is None or not is_ours(connection):
            raise PermissionError(f"a process of another container listens at {os.path.join(folder.path, name)}")
        return connection


def _name(python: Interpreter, env: Mapping[str, str | None], anchor: int) -> str:
    """Return the name of the server for these settings. Only this user sees it, so it may depend on variables."""
    started = psutil.Process(anchor).create_time()
    # These decide which torch the server imports, together with the run's changes.
    interpreter = [python.executable, python.environ.get("PYTHONPATH")]
    identity = json.dumps([anchor, started, namespaces("self"), interpreter, sorted(env.items(), key=str)])
    return hashlib.sha256(identity.encode()).hexdigest()[:24]


def _start(
    python: Interpreter, folder: str, given: socket.socket, env: Mapping[str, str | None], anchor: int, linger: float
) -> None:
    path = os.pathsep.join(os.path.abspath(entry) for entry in python.path if entry)
    started = subprocess.Popen(
        [
            python.executable,
            "-m",
            "spark_hvd.runner.supervise.forkserver",
            folder,
            str(given.fileno()),
            str(anchor),
            str(linger),
        ],
        pass_fds=[given.fileno()],
        env={**apply_env(python.environ, env), "PYTHONPATH": path},
        cwd="/",  # -m searches the working directory first, and others may be able to write to this program's
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    # poll() also reaps the servers that have ended.
    _started[:] = [process for process in _started if process.poll() is None] + [started]


def _forget_after_fork() -> None:
    # A forked copy of this process must not hold the connections open, because closing them is what ends the ranks.
    for server in _servers.values():
        server.close()
    _servers.clear()
    _latest.clear()


os.register_at_fork(after_in_child=_forget_after_fork)
