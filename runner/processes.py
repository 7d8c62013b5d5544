"""Starting rank processes: this side of the fork server."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from spark_hvd.runner.forkserver import REQUEST_LENGTH

_MAX_SERVERS = 2  # a server holds ~200 MB; two, so that alternating between two environments stays fast


@dataclass(slots=True)
class RankProcess:
    """A running rank, and this process' ends of its pipes."""

    pid: int
    control: socket.socket
    stdout_fd: int
    stderr_fd: int
    stacks_fd: int
    status_fd: int
    server: ForkServer

    def signal_group(self, signum: signal.Signals) -> None:
        """Send a signal to the rank and to everything it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signum)

    def stacks(self) -> str:
        """What the rank's fault handler has written: the Python stacks of its threads."""
        return os.pread(self.stacks_fd, 1 << 16, 0).decode(errors="replace")

    def close(self) -> None:
        """Close our ends; the process is gone by now, or will be killed by the fork server."""
        self.control.close()
        for fd in (self.stdout_fd, self.stderr_fd, self.stacks_fd, self.status_fd):
            os.close(fd)
        self.server.ranks -= 1


class ForkServerError(RuntimeError):
    """The fork server has ended, or never came up; the next run starts another."""


class ForkServer:
    """A handle on one fork server process (see :mod:`spark_hvd.runner.forkserver`).

    Args:
        env: Environment of the server, and so what native libraries read when they are loaded.
        import_path: Directories from which it can import spark_hvd and torch.
    """

    def __init__(self, env: Mapping[str, str], import_path: Iterable[str]) -> None:
        self.ranks = 0  # forked and not yet closed
        self._lock = threading.Lock()
        ours, theirs = socket.socketpair()
        self._socket = ours
        server_env = {**env, "PYTHONPATH": os.pathsep.join(path for path in import_path if path)}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "spark_hvd.runner.forkserver", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=server_env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the server can still fork."""
        return self._process.poll() is None

    def spawn(self, env: Mapping[str, str], timeout: float) -> RankProcess:
        """Fork a rank process, which waits for its first frame on ``control``.

        Args:
            env: The rank's complete environment.
            timeout: Seconds to wait for a server that is still importing torch.

        Raises:
            ForkServerError: the server ended, or did not answer in time.
        """
        control, child_control = socket.socketpair()
        out_read, out_write = os.pipe()
        err_read, err_write = os.pipe()
        status_read, status_write = os.pipe()
        with tempfile.TemporaryFile() as file:  # nameless: it goes with the last descriptor
            stacks = os.dup(file.fileno())
        request = {
            "env": dict(env),
            "sys_path": sys.path,
            "argv": sys.argv[:1],
            "cwd": os.getcwd(),
            "server_pid": self.pid,
        }
        given = (child_control.fileno(), out_write, err_write, stacks, status_write)
        try:
            with self._lock:
                body = json.dumps(request).encode()
                socket.send_fds(self._socket, [REQUEST_LENGTH.pack(len(body))], given)
                self._socket.sendall(body)
                pid = self._read_pid(status_read, timeout)
                self.ranks += 1
        except (OSError, ForkServerError) as error:
            control.close()
            for fd in (out_read, err_read, stacks, status_read):
                os.close(fd)
            raise ForkServerError(
                f"the fork server of {sys.executable} (pid {self.pid}) gave no process: {error}. "
                "Its own error, if any, is in the log of the Spark executor."
            ) from error
        finally:
            child_control.close()
            for fd in (out_write, err_write, status_write):
                os.close(fd)
        return RankProcess(pid, control, out_read, err_read, stacks, status_read, self)

    def _read_pid(self, status_fd: int, timeout: float) -> int:
        readable, _, _ = select.select([status_fd, self._socket.fileno()], [], [], timeout)
        if not readable:
            raise ForkServerError(f"no answer in {timeout:.0f} s")
        if self._socket.fileno() in readable:  # the server never writes here: this is its end
            raise ForkServerError(f"it ended with exit code {self._process.wait()}")
        pid: int = json.loads(_read_line(status_fd))["pid"]
        return pid

    def disown(self) -> None:
        """Close this process' copy of the socket and leave the server to the process that started it."""
        self._socket.close()

    def close(self) -> None:
        """End the server and every rank that it forked; returns when they are gone."""
        self._socket.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _read_line(fd: int) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(fd, 1)
        if not byte:
            raise ForkServerError("it closed the pipe")
        line += byte
    return line


_servers: OrderedDict[frozenset[tuple[str, str | None]], ForkServer] = OrderedDict()
_servers_lock = threading.Lock()


def fork_server(env: Mapping[str, str | None]) -> ForkServer:
    """The warm fork server of this process for a run's changes to the environment; started when there is none.

    It starts with them, because native libraries read some variables when they are loaded (OMP_*, MKL_*, LD_*). Every
    rank gets its complete environment besides, so other changes in this process reach it too.

    Kept until this process ends (a Spark Python worker lives for a minute after its last task), because its whole
    worth is to be there for the next run. The least recently used server is ended when there are more than two.
    """
    key = frozenset(env.items())
    with _servers_lock:
        server = _servers.pop(key, None)
        if server is None or not server.alive:
            server = ForkServer(apply_env(os.environ, env), sys.path)
        _servers[key] = server
        for old_key, old in list(_servers.items())[:-_MAX_SERVERS]:
            if old.ranks == 0:
                _servers.pop(old_key).close()
    return server


def apply_env(base: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    """``base`` with ``changes``; a change to None removes the variable."""
    env = {**base, **changes}
    return {key: value for key, value in env.items() if value is not None}


def close_fork_servers() -> None:
    """End the warm fork servers of this process, for example before measuring its memory."""
    with _servers_lock:
        while _servers:
            _servers.popitem()[1].close()


def _forget_after_fork() -> None:
    # A forked copy of this process must not hold the sockets open: their closing is what ends the servers.
    for server in _servers.values():
        server.disown()
    _servers.clear()


atexit.register(close_fork_servers)
os.register_at_fork(after_in_child=_forget_after_fork)
