"""The fork server: a process with torch imported, out of which ranks are forked in milliseconds.

Importing torch takes seconds. A process that has done it once and stays can fork a rank at once, and a rank that
crashes takes nobody along. (Python's own ``multiprocessing.forkserver`` leaves its children behind when it loses its
parent, and re-imports the parent's ``__main__``, which in a Spark worker is Spark's daemon.)

Run as ``python -m spark_hvd.runner.forkserver FD``: FD is a Unix socket on which each request arrives as a length with
five file descriptors, then a JSON object. When that socket closes, the server kills every child with its process
group and leaves: so nothing outlives the process that started it, however that one died.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import selectors
import signal
import socket
import struct
import sys
from typing import Any, NoReturn

from spark_hvd.runner.wire import recv_exactly

PR_SET_PDEATHSIG = 1
REQUEST_LENGTH = struct.Struct("!I")


def main(fd: int) -> int:
    """Serve until the socket closes; returns the exit code."""
    requests = socket.socket(fileno=fd)
    _preload()
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one who asked; he will close the socket
    signal.set_wakeup_fd(wake_write)
    status_fds: dict[int, int] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(requests, selectors.EVENT_READ)
        selector.register(wake_read, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is requests:
                    request, fds = _receive(requests)
                    if request is None:
                        _kill_all(status_fds)
                        return 0
                    control_fd, out_fd, err_fd, stacks_fd, status_fd = fds
                    pid = os.fork()
                    if pid == 0:
                        signal.set_wakeup_fd(-1)
                        for other in (wake_read, wake_write, status_fd, *status_fds.values()):
                            os.close(other)
                        selector.close()
                        requests.close()
                        _run_child(request, control_fd, out_fd, err_fd, stacks_fd)
                    for given in (control_fd, out_fd, err_fd, stacks_fd):
                        os.close(given)
                    status_fds[pid] = status_fd
                    _report(status_fd, {"pid": pid})
                else:
                    with contextlib.suppress(BlockingIOError):
                        os.read(wake_read, 4096)
                    _reap(status_fds)


def _preload() -> None:
    """Import what every rank needs. A missing torch is not reported here: each rank does so, to its driver."""
    with contextlib.suppress(ImportError):
        import torch

        import spark_hvd.runner.child
        import spark_hvd.torch  # noqa: F401

        # The first optimizer of a process imports torch._dynamo and sympy, which takes as long as torch itself.
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    gc.freeze()  # keeps the collector from touching, and so copying, the pages shared with children


def _receive(requests: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    prefix, fds, _, _ = socket.recv_fds(requests, REQUEST_LENGTH.size, 5)
    if len(prefix) < REQUEST_LENGTH.size:
        return None, []
    body = recv_exactly(requests, REQUEST_LENGTH.unpack(prefix)[0])
    return (None if body is None else json.loads(body)), fds


def _run_child(request: dict[str, Any], control_fd: int, out_fd: int, err_fd: int, stacks_fd: int) -> NoReturn:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.setsid()  # its own process group: what it starts can be killed with it
    _die_with_parent(request["server_pid"])
    os.dup2(out_fd, 1)
    os.dup2(err_fd, 2)
    os.close(out_fd)
    os.close(err_fd)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update(request["env"])
    sys.path[:] = request["sys_path"]
    sys.argv[:] = request["argv"]
    os.chdir(request["cwd"])

    from spark_hvd.runner.child import run_rank

    run_rank(socket.socket(fileno=control_fd), stacks_fd)


def _die_with_parent(parent: int) -> None:
    """Ask the kernel (Linux) to kill this process when its parent dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before we could ask
        os._exit(1)


def _reap(status_fds: dict[int, int]) -> None:
    """Report children that ended, and kill what they left in their process groups."""
    while status_fds:
        # WNOWAIT keeps the zombie, and so its process group's number, until the group has been killed.
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(ended.si_pid, signal.SIGKILL)
        _, status = os.waitpid(ended.si_pid, 0)
        status_fd = status_fds.pop(ended.si_pid)
        _report(status_fd, {"exitcode": os.waitstatus_to_exitcode(status)})
        os.close(status_fd)


def _kill_all(status_fds: dict[int, int]) -> None:
    for pid in status_fds:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    for pid in status_fds:
        os.waitpid(pid, 0)


def _report(status_fd: int, message: dict[str, int]) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(status_fd, json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
