"""Starts, finds and ends the processes of a Spark standalone cluster and of a Spark Connect server."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from tests.conftest import LOCAL_CLUSTER, wait_until
from tests.jvm import SHORT_LIVED


def free_port() -> int:
    """Return a free port of this host's loopback interface."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


def listens(address: str, port: int) -> bool:
    """Return whether an address accepts connections."""
    try:
        socket.create_connection((address, port), 1.0).close()
    except OSError:
        return False
    return True


def command_line(process: psutil.Process) -> str:
    """Return the command line of a process; empty if it has ended."""
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process, by force if it does not end soon."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGTERM)
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(5)


@contextlib.contextmanager
def connect_server(home: Path, folder: Path, settings: Mapping[str, Any], **environment: str) -> Iterator[str]:
    """Start a Spark Connect server with the cluster of the other tests, and yield its address.

    Args:
        home: A folder with a complete PySpark.
        folder: A folder for its log and its temporary files.
        settings: Spark settings, besides the usual ones.
        environment: Environment variables, besides those of this process.
    """
    port = free_port()
    usual = {
        "spark.connect.grpc.binding.port": port,
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.executor.extraJavaOptions": SHORT_LIVED,
        "spark.driver.extraJavaOptions": SHORT_LIVED,
    }
    conf = [word for key, value in {**usual, **settings}.items() for word in ("--conf", f"{key}={value}")]
    log = folder / "server.log"
    command = ["setpriv", "--pdeathsig", "KILL", str(home / "bin" / "spark-submit"), "--master", LOCAL_CLUSTER]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--class", "org.apache.spark.sql.connect.service.SparkConnectServer", *conf, "spark-internal"],
            env={**os.environ, "SPARK_HOME": str(home), "TMPDIR": str(folder), **environment},  # others look at theirs
            stdout=output,
            stderr=subprocess.STDOUT,
        )

    def ready() -> bool:
        assert process.poll() is None, log.read_text()[-4000:]
        return listens("127.0.0.1", port)

    try:
        wait_until(ready, 300)
        yield f"sc://127.0.0.1:{port}"
    finally:
        end(process)
