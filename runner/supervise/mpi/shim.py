"""The shim that MPI's process manager starts instead of a rank: it hands over the connection, and waits for the end.

MPICH's proxies start programs and give each an open connection (PMI_FD), over which MPI_Init finds its peers. Our ranks
come from a fork server that has imported torch, and a supervisor watches them. So the proxy starts this shim instead.
It passes the connection and the environment to the supervisor (SCM_RIGHTS over a Unix socket), and exits with the code
that the supervisor sends. It runs as a plain file, without site-packages, because it must be quick. It imports one file
of runner/channel, and nothing else of ours.

``shim.py guard PROGRAM ARGS...`` runs a program that is killed when the process that asked for it ends.
``shim.py agent HOST COMMAND...`` replaces ssh for Open MPI: it prints host and command as a line of JSON.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import time

if __name__ == "__main__":
    sys.path[0] = os.path.join(os.path.dirname(os.path.dirname(sys.path[0])), "channel")
    from private_sockets import is_ours  # type: ignore[import-not-found]
else:
    from spark_hvd.runner.channel.private_sockets import is_ours

FOLDER = "SPARK_HVD_MPI_FOLDER"
"""The variable that names the folder in which the supervisors of this host's ranks listen, each under its rank."""
LAUNCH = "SPARK_HVD_LAUNCH:"
_PASSED = ("PMI", "MPI", "OMPI", "PRTE", "OPAL")
_PATIENCE = 600.0  # seconds; a shim that is no longer needed is killed with its parent
_PR_SET_PDEATHSIG = 1


def main(environment: dict[str, str]) -> int:
    """Hand the rank's connection and variables over, wait for its end, and return the exit code."""
    _die_with_parent()
    rank = int(environment.get("PMI_RANK") or environment["OMPI_COMM_WORLD_RANK"])
    passed = {key: value for key, value in environment.items() if key.startswith(_PASSED)}
    fds = [int(environment["PMI_FD"])] if "PMI_FD" in environment else []
    with _connected(environment[FOLDER], rank) as supervisor:
        socket.send_fds(supervisor, [json.dumps(passed).encode()], fds)
        for fd in fds:
            os.close(fd)  # so that the proxy notices when the rank closes its copy
        code = supervisor.recv(16)
    return int(code) if code else 1  # an empty message means that the supervisor is gone


def _connected(folder: str, rank: int) -> socket.socket:
    # The supervisor may still be waiting for its fork server to import torch, in another executor of this host.
    until = time.monotonic() + _PATIENCE
    folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        while True:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                connection.connect(f"/proc/self/fd/{folder_fd}/{rank}")  # a socket's address cannot be a long path
            except (FileNotFoundError, ConnectionRefusedError):
                connection.close()
                if time.monotonic() > until:
                    raise
                time.sleep(0.02)
            else:
                break
    finally:
        os.close(folder_fd)
    if not is_ours(connection):
        raise SystemExit(f"the process that listens at {folder}/{rank} is another user's, or in another container")
    return connection


def guard(command: list[str]) -> None:
    """Become another program, which the kernel kills when our parent dies."""
    _die_with_parent()
    os.execvp(command[0], command)


def _die_with_parent() -> None:
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent died before we could ask
        os._exit(1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["guard"]:
        guard(sys.argv[2:])
    if sys.argv[1:2] == ["agent"]:
        print(LAUNCH + json.dumps([sys.argv[2], " ".join(sys.argv[3:]).strip()]), flush=True)
        sys.exit(0)
    sys.exit(main(dict(os.environ)))
