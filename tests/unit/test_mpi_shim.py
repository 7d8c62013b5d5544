"""The shim that MPI's process manager starts, as a process of its own."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import time

from spark_hvd.runner.mpi_shim import TOKEN, address
from spark_hvd.runner.process_manager import SHIM_PROGRAM, manager_env


def test_it_waits_for_a_supervisor_that_is_late_and_hands_everything_over() -> None:
    token = secrets.token_hex(8)
    ours, theirs = socket.socketpair()
    env = {**manager_env(os.environ, token), "PMI_RANK": "3", "PMI_SIZE": "4", "PMI_FD": str(theirs.fileno())}
    shim = subprocess.Popen(SHIM_PROGRAM, env=env, pass_fds=[theirs.fileno()])
    theirs.close()
    time.sleep(0.5)
    assert shim.poll() is None
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address(token, 3))
        listener.listen()
        listener.settimeout(20)
        connection, _ = listener.accept()
    with connection, ours:
        text, fds, _, _ = socket.recv_fds(connection, 1 << 16, 1)
        passed = json.loads(text)
        assert (passed["PMI_RANK"], passed["PMI_SIZE"]) == ("3", "4")
        assert TOKEN not in passed
        with socket.socket(fileno=fds[0]) as received:
            received.sendall(b"here")
            assert ours.recv(8) == b"here"
        assert ours.recv(8) == b"", "the shim has closed its own copy"
        connection.send(b"5")
        assert shim.wait(20) == 5


def test_it_ends_with_its_supervisor() -> None:
    token = secrets.token_hex(8)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address(token, 0))
        listener.listen()
        shim = subprocess.Popen(SHIM_PROGRAM, env={**manager_env(os.environ, token), "OMPI_COMM_WORLD_RANK": "0"})
        connection, _ = listener.accept()
        connection.close()
    assert shim.wait(20) == 1
