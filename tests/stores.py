"""Fixtures of stores: servers of S3, and of Google's and Azure's storage if installed; and small disks."""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from spark_hvd.store import Store
from tests import hdfs as hadoop
from tests.conftest import wait_until
from tests.daemons import end, free_port, listens

AZURITE = "azurite-blob"
HAS_GS = all(map(importlib.util.find_spec, ("gcsfs", "gcp_storage_emulator")))
HAS_HDFS = importlib.util.find_spec("hdfs_native") is not None and hadoop.JARS.exists()
HAS_ABFS = importlib.util.find_spec("adlfs") is not None and shutil.which(AZURITE) is not None


def remote() -> list[str]:
    """Return the fixtures of servers that are available here. Their names are those of their protocols."""
    return ["s3", *["gs"] * HAS_GS, *["abfs"] * HAS_ABFS, *["hdfs"] * HAS_HDFS]


def created(protocol: str, server: Any) -> Store:
    """Return a new store on the server that the fixture of this name provides."""
    path = uuid.uuid4().hex
    if protocol == "hdfs":
        return Store.create(f"{server}/{path}")
    return Store.create(f"{protocol}://bucket/{path}", storage_options=server)


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, Any]]:
    """The storage options of a real S3 server with one bucket, ``bucket``."""
    server_of = pytest.importorskip("moto.server").ThreadedMotoServer
    s3fs = pytest.importorskip("s3fs")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = server_of("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    options = {"endpoint_url": f"http://{host}:{port}", "key": "test", "secret": "test"}
    s3fs.S3FileSystem(**options).makedirs("bucket", exist_ok=True)  # servers of one process share their content
    yield options
    server.stop()


@contextlib.contextmanager
def _server(port: int, *command: str) -> Iterator[None]:
    """Run a server in its own process, and wait until it listens on ``port``."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(["setpriv", "--pdeathsig", "KILL", *command], stdout=log, stderr=log)

        def ready() -> bool:
            assert process.poll() is None, log.seek(0) or log.read().decode()[-4000:]
            return listens("127.0.0.1", port)

        try:
            wait_until(ready, 60)
            yield
        finally:
            end(process)


@pytest.fixture(scope="module")
def gs() -> Iterator[dict[str, Any]]:
    """The storage options of a server of Google's storage with one bucket, ``bucket``."""
    port = free_port()
    command = [sys.executable, "-m", "gcp_storage_emulator", "start", "--host=127.0.0.1", f"--port={port}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # gcsfs asks Google what kind of bucket it is
        with _server(port, *command, "--in-memory", "--default-bucket=bucket"):
            yield {"endpoint_url": f"http://127.0.0.1:{port}", "token": "anon"}


@pytest.fixture(scope="module")
def abfs() -> Iterator[dict[str, Any]]:
    """The storage options of a server of Azure's storage with one container, ``bucket``."""
    port = free_port()
    key = base64.b64encode(os.urandom(64)).decode()
    address = f"http://127.0.0.1:{port}/account"
    account = f"DefaultEndpointsProtocol=http;AccountName=account;AccountKey={key};BlobEndpoint={address};"
    command = [AZURITE, f"--blobPort={port}", "--blobHost=127.0.0.1", "--inMemoryPersistence"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AZURITE_ACCOUNTS", f"account:{key}")
        with _server(port, *command, "--disableTelemetry", "--skipApiVersionCheck"):
            options = {"connection_string": account}
            fsspec.filesystem("abfs", **options).mkdir("bucket")
            yield options


@pytest.fixture(scope="module")
def hdfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of an HDFS server."""
    with hadoop.hdfs(tmp_path_factory.mktemp("hdfs")) as address:
        yield address


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mount a tmpfs of 64 KiB, with options."""
    mounted = []

    def mount_it(*options: str) -> Path:
        path = tmp_path / f"mount{len(mounted)}"
        path.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", ",".join(["size=64k", *options]), "tmpfs", str(path)]
        if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
            pytest.skip("needs the right to mount a tmpfs")
        mounted.append(path)
        return path

    yield mount_it
    for path in mounted:
        subprocess.run(["umount", str(path)], check=True)


def everything(store: Store) -> list[str]:
    """Return all files of a store, including temporary ones."""
    filesystem = store.filesystem
    return (
        sorted(filesystem.find(store.inner_path(store.url))) if filesystem.exists(store.inner_path(store.url)) else []
    )


def scratch() -> set[str]:
    return {name for name in os.listdir(tempfile.gettempdir()) if name.startswith("spark_hvd-")}


class _Forbids(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
        self.send_response(403)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else body)

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815 - names that http.server looks for

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def forbidden() -> Iterator[Store]:
    """A store in a bucket that denies all access."""
    pytest.importorskip("s3fs")
    with ThreadingHTTPServer(("127.0.0.1", 0), _Forbids) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        options = {"endpoint_url": f"http://127.0.0.1:{server.server_port}", "key": "test", "secret": "hush"}
        yield Store.create("s3://bucket/fits", storage_options=options)
        server.shutdown()
        thread.join()


class GatedFileSystem(LocalFileSystem):  # type: ignore[misc] # Any
    """A file system of local folders, in which writing a file waits until another file, the gate, exists."""

    protocol = "gated"

    def __init__(self, gate: str = "", **options: Any) -> None:
        super().__init__(auto_mkdir=True, **options)
        self.gate = gate

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.removeprefix("gated://")))

    def put_file(self, *args: Any, **options: Any) -> None:
        while not os.path.exists(self.gate):
            time.sleep(0.005)
        super().put_file(*args, **options)


def gated(folder: Path) -> Store:
    """Return a store in ``folder / "run"`` whose files are written once ``folder / "open"`` exists."""
    fsspec.register_implementation("gated", GatedFileSystem, clobber=True)
    return Store.create(f"gated://{folder / 'run'}", storage_options={"gate": str(folder / "open")})
