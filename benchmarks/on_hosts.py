"""Runs a benchmark's ranks on hosts that are network namespaces, whose cables carry a given rate and no more."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

_PORT = 29500
_PATIENCE = timedelta(seconds=60)
_NIC = Path("/sys/class/net/eth0/statistics")


def run_on_hosts(
    module: str, arguments: Sequence[str], hosts: int, rate: str, *, per_host: int = 1, burst: str = "256kb"
) -> Any:
    """Make hosts, run a program of ranks on them, unmake them.

    Args:
        module: What `python -m` starts on each host, with ``--rank FILE`` before the arguments: it enters
            :func:`process_group` and writes what it measured to the file, as JSON.
        arguments: Given to it after that.
        hosts: Number of hosts.
        rate: Of every cable in both directions, in tc's words; "none" for no limit.
        per_host: Ranks on each host, next to each other in the world.
        burst: Bytes that may pass a cable at once, in tc's words; a shaped cable slows down only what is longer.

    Returns:
        What rank 0 wrote.

    Raises:
        RuntimeError: no hosts can be made here, or a rank failed.
    """
    from tests.multihost.hosts import make_hosts, why_not

    if (reason := why_not()) is not None:
        raise RuntimeError(f"hosts cannot be made here: {reason}")
    with make_hosts(hosts) as net, tempfile.TemporaryDirectory(prefix="on-hosts-") as folder:
        world = {"WORLD_SIZE": str(hosts * per_host), "MASTER_ADDR": net[0].address, "MASTER_PORT": str(_PORT)}
        world |= {"LOCAL_WORLD_SIZE": str(per_host), "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        world["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
        processes = []
        for number, host in enumerate(net.hosts):
            if rate != "none":
                net.shape(host, rate, burst)
            command = [sys.executable, "-m", module, "--rank", str(Path(folder, f"{number}.json")), *arguments]
            env = {**world, "RANK": str(number * per_host)}
            processes.append(host.start(*command, log=Path(folder, f"{number}.log"), env=env))
        while None in (codes := [process.poll() for process in processes]) and not any(codes):
            time.sleep(0.1)
        if any(codes):
            logs = (path.read_text()[-2000:] for path in sorted(Path(folder).glob("*.log")))
            raise RuntimeError("a rank failed:\n" + "\n".join(logs))
        return json.loads(Path(folder, "0.json").read_text())


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """On a host: be all of its ranks, each a process, with Gloo's default group open."""
    import torch.distributed as dist

    others: list[int] = []
    first = int(os.environ["RANK"])
    for local in range(1, int(os.environ["LOCAL_WORLD_SIZE"])):
        if (child := os.fork()) == 0:
            os.environ["RANK"] = str(first + local)
            others.clear()
            break
        others.append(child)
    mine = int(os.environ["RANK"]) == first
    code = 1
    try:
        dist.init_process_group("gloo", timeout=_PATIENCE)
        yield
        dist.destroy_process_group()
        code = 0
    finally:
        if not mine:
            if code:
                traceback.print_exc()
            sys.stderr.flush()
            os._exit(code)
    if any([os.waitpid(child, 0)[1] for child in others]):
        raise RuntimeError("another rank of this host failed; its traceback is above")


def carried() -> tuple[int, int]:
    """Bytes that this host has sent and received over its cable so far, with all headers."""
    sent, received = ((_NIC / f"{way}_bytes").read_text() for way in ("tx", "rx"))
    return int(sent), int(received)
