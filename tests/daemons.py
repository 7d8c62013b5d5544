"""The processes of a Spark standalone cluster: whether one listens, what it is, and its end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess

import psutil


def listens(address: str, port: int) -> bool:
    """Whether somebody takes connections there."""
    try:
        socket.create_connection((address, port), 1.0).close()
    except OSError:
        return False
    return True


def command_line(process: psutil.Process) -> str:
    """What a process was started with; empty if it has gone."""
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process, by force if it takes its time."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGTERM)
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(5)
