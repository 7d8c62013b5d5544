"""A real HDFS with one NameNode and one DataNode, from the jars of PySpark 3.0.1. Later versions have no server."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.conftest import wait_until
from tests.daemons import end, free_port, listens

JARS = Path(sys.prefix, "hadoop")
"""Where the row `stores` of tests/matrix.py puts them."""
PACKAGE = "org.apache.hadoop.hdfs.server"
OPENED = ("java.lang", "java.util", "java.io", "java.net", "java.nio", "sun.nio.ch")  # Hadoop 2.7 is older than modules


@contextlib.contextmanager
def hdfs(folder: Path) -> Iterator[str]:
    """Run HDFS in a folder, and yield its address, such as ``hdfs://127.0.0.1:8020``."""
    name, data = free_port(), free_port()
    for page in ("hdfs", "datanode"):
        (folder / "conf" / "webapps" / page).mkdir(parents=True)
    _configure(
        folder / "conf" / "core-site.xml",
        {"fs.defaultFS": f"hdfs://127.0.0.1:{name}", "hadoop.tmp.dir": str(folder / "data")},
    )
    loopback = ("namenode.http", "namenode.secondary.http", "datanode", "datanode.ipc", "datanode.http")
    kinds = {each: f"dfs.{each}{'-' if each.startswith('namenode') else '.'}address" for each in loopback}
    ports = {kinds[each]: f"127.0.0.1:{data if each == 'datanode' else 0}" for each in loopback}
    others = {"dfs.replication": "1", "dfs.permissions.enabled": "false", "dfs.webhdfs.enabled": "false"}
    _configure(
        folder / "conf" / "hdfs-site.xml",
        {**ports, **others, "dfs.namenode.rpc-bind-host": "127.0.0.1", "dfs.datanode.hostname": "127.0.0.1"},
    )
    opened = [word for package in OPENED for word in ("--add-opens", f"java.base/{package}=ALL-UNNAMED")]
    classes = ":".join([str(folder / "conf"), *map(str, sorted(JARS.glob("*.jar")))])
    kerberos = "java.security.jgss/sun.security.krb5=ALL-UNNAMED"
    java = ["java", *opened, "--add-exports", kerberos, "--add-opens", kerberos, "-Xmx256m", "-cp", classes]
    subprocess.run([*java, f"{PACKAGE}.namenode.NameNode", "-format", "-force"], capture_output=True, check=True)
    with contextlib.ExitStack() as stack:
        for main, port in (("namenode.NameNode", name), ("datanode.DataNode", data)):
            log = folder / f"{main}.log"
            output = stack.enter_context(log.open("wb"))
            command = ["setpriv", "--pdeathsig", "KILL", *java, f"{PACKAGE}.{main}"]
            process = subprocess.Popen(command, stdout=output, stderr=output, cwd=folder, env=os.environ)
            stack.callback(end, process)

            def ready(process: subprocess.Popen[bytes] = process, log: Path = log, port: int = port) -> bool:
                assert process.poll() is None, log.read_text()[-4000:]
                return listens("127.0.0.1", port)

            wait_until(ready, 90)

        # In its own process: fsspec's file system would hang the child in which PySpark starts Java.
        put = f"import fsspec; fsspec.filesystem('hdfs', host='127.0.0.1', port={name}).pipe_file('/ready', b'yes')"

        def takes_files() -> bool:  # once the DataNode has registered with the NameNode
            return subprocess.run([sys.executable, "-c", put], capture_output=True, timeout=60).returncode == 0

        wait_until(takes_files, 90)
        yield f"hdfs://127.0.0.1:{name}"


def _configure(file: Path, settings: Mapping[str, str]) -> None:
    lines = [f"<property><name>{key}</name><value>{value}</value></property>" for key, value in settings.items()]
    file.write_text("\n".join(["<configuration>", *lines, "</configuration>\n"]))
