"""The shim that MPI's process manager starts, as a separate process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from pathlib import Path

from spark_hvd.runner.channel.private_sockets import SocketFolder
from spark_hvd.runner.supervise.mpi.manager import SHIM_PROGRAM, manager_env
from spark_hvd.runner.supervise.mpi.shim import FOLDER


def test_it_waits_for_a_supervisor_that_is_late_and_hands_everything_over(tmp_path: Path) -> None:
    path = str(tmp_path / ("long" * 40))
    SocketFolder(path).__exit__()
    ours, theirs = socket.socketpair()
    env = {**manager_env(os.environ, path), "PMI_RANK": "3", "PMI_SIZE": "4", "PMI_FD": str(theirs.fileno())}
    shim = subprocess.Popen(SHIM_PROGRAM, env=env, pass_fds=[theirs.fileno()])
    theirs.close()
    time.sleep(0.5)
    assert shim.poll() is None
    with SocketFolder(path) as folder, folder.listen("3", socket.SOCK_SEQPACKET) as listener:
        listener.settimeout(20)
        connection, _ = listener.accept()
    with connection, ours:
        text, fds, _, _ = socket.recv_fds(connection, 1 << 16, 1)
        passed = json.loads(text)
        assert (passed["PMI_RANK"], passed["PMI_SIZE"]) == ("3", "4")
        assert FOLDER not in passed
        with socket.socket(fileno=fds[0]) as received:
            received.sendall(b"here")
            assert ours.recv(8) == b"here"
        assert ours.recv(8) == b"", "the shim has closed its own copy"
        connection.send(b"5")
        assert shim.wait(20) == 5


def test_it_ends_with_its_supervisor(tmp_path: Path) -> None:
    path = str(tmp_path / "sockets")
    with SocketFolder(path) as folder, folder.listen("0", socket.SOCK_SEQPACKET) as listener:
        shim = subprocess.Popen(SHIM_PROGRAM, env={**manager_env(os.environ, path), "OMPI_COMM_WORLD_RANK": "0"})
        connection, _ = listener.accept()
        connection.close()
    assert shim.wait(20) == 1
