"""A rank of a run that starts with all its ranks: meets them once, runs fn, stays until all have ended."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import sys
import time
from collections import defaultdict
from datetime import timedelta
from typing import Any

from spark_hvd.context import init as context
from spark_hvd.context import leave
from spark_hvd.context.profile import StepProfiler
from spark_hvd.runner.channel.frames import recv_frame, send_frame
from spark_hvd.runner.rank.gpus import GpuError
from spark_hvd.runner.rank.order import RankOrder
from spark_hvd.runner.rank.own_gpu import settle
from spark_hvd.runner.rank.process import RandomState, SetupFailure, call, unpickle_call
from spark_hvd.runner.rank.reporting import VitalsSender
from spark_hvd.transport.rendezvous import all_gather_facts
from spark_hvd.transport.torch_private import PrefixStore, Store, TCPStore
from spark_hvd.world.layout import Endpoint, RankInfo, World
from spark_hvd.world.ports import PortRange, listen

SECONDS = 15.0
"""How long a connection may take to come up."""
_RETRY_SECONDS = 0.2


class UnreachableError(RuntimeError):
    """A rank cannot connect to another."""


def connect(host: str, port: int, whom: str, mine: str, seconds: float = SECONDS) -> None:
    """Open a connection to a rank, and close it.

    Raises:
        UnreachableError: Naming both ends, and what to look at.
    """
    until = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, port), timeout=max(until - time.monotonic(), 0.1)).close()
            return
        except OSError as error:
            if time.monotonic() + _RETRY_SECONDS >= until:
                raise UnreachableError(
                    f"{mine} cannot reach {whom} at {host}:{port} ({error}; tried for {seconds:.0f} s). Check that the "
                    "network between the two hosts is up and lets this port through (ports= gives ranks a range to "
                    "listen on; Gloo and NCCL use the kernel's net.ipv4.ip_local_port_range), and that the address is "
                    "on the right network (interfaces= chooses another)."
                ) from error
        time.sleep(_RETRY_SECONDS)


def check_hosts(me: RankInfo, ip: str, kv: Store, ports: PortRange | None, seconds: float = SECONDS) -> None:
    """Let the first rank of every host connect to that of the next host, round in a ring.

    So each host's address is tried by one other: a wrong interface, or a firewall round one host, is found and named.

    ``ip`` is my address, and ``seconds`` is how long to try to connect. ``ports`` is where to listen; None: any.

    Raises:
        UnreachableError: I cannot connect.
    """
    if me.local_rank != 0 or me.cross_size == 1:
        return
    kv = PrefixStore("reach", kv)
    following = (me.cross_rank + 1) % me.cross_size
    with contextlib.closing(listen(ip, ports)) as listener:
        place = [me.rank, me.host, ip, listener.getsockname()[1]]
        kv.set(f"at/{me.cross_rank}", json.dumps(place))
        rank, host, address, port = json.loads(kv.get(f"at/{following}"))
        connect(address, port, f"rank {rank} on host {host}", f"rank {me.rank} on host {me.host} ({ip})", seconds)
        kv.set(f"reached/{following}", "yes")
        kv.get(f"reached/{me.cross_rank}")  # the one before me may still be on its way to my listener


class MpiMismatchError(RuntimeError):
    """A host has another MPI than rank 0's, or none."""


def library_version() -> str:
    """The MPI library that mpi4py has loaded, by name and version; MPI is not initialised by this.

    Raises:
        MpiMismatchError: mpi4py or its library cannot be imported.
    """
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        from mpi4py import MPI

        first = MPI.Get_library_version().splitlines()[0]
    except (ImportError, RuntimeError) as error:
        raise MpiMismatchError(
            f"mpi4py cannot be used by {sys.executable}: {error}. Install it with an MPI library in that Python on "
            "every executor: pip install mpi4py mpich."
        ) from error
    return " ".join(first.strip("\0 ").split())


def check_same_mpi(me: RankInfo, kv: Store) -> None:
    """Compare the MPI libraries of all ranks; every rank calls this.

    Raises:
        MpiMismatchError: They differ, or a rank has none; raised on every rank, naming hosts and versions.
    """
    try:
        mine, fault = library_version(), None
    except MpiMismatchError as error:
        mine, fault = "none", error
    found = all_gather_facts([mine, me.host], PrefixStore("mpi", kv), me.rank, me.size)
    if fault is not None:
        raise fault
    hosts = defaultdict(set)
    for version, host in found:
        hosts[version].add(host)
    if len(hosts) > 1:
        listed = "; ".join(f"{version} on {', '.join(sorted(names))}" for version, names in sorted(hosts.items()))
        raise MpiMismatchError(
            f"the hosts have different MPI libraries: {listed}. Install the same on all, for instance from one "
            "environment that is shipped with the application (spark.archives)."
        )


class StaticRank:
    """See the module's description."""

    def __init__(self, control: socket.socket, order: RankOrder) -> None:
        self._control = control
        self._order = order
        self.rank: int = order.me.rank
        self._kv: Any = None
        self._ended_well = False

    def run(self, payload: bytes | memoryview) -> Any:
        """Meet the others, and call fn."""
        fn, args, kwargs = unpickle_call(payload, RandomState(self._order.seed, self._order.stream))
        if not self._join():
            sys.exit(1)  # the supervisor closed: another rank has failed before we could meet
        reporting = VitalsSender(
            lambda kind, **fields: send_frame(self._control, {"type": kind, **fields}),
            lambda: self._hear(reporting.profiler),
        )
        if self._order.watched:
            reporting.start()
        try:
            value = call(fn, args, kwargs)
        finally:
            reporting.stop()
        self._ended_well = True
        return value

    def leave(self) -> None:
        """Leave the world as soon as fn has returned: peers that still wait for this rank must hear of it.

        A rank whose fn failed stays until it is killed instead, so that no peer reports its absence as an error.
        """
        if self._ended_well:
            leave.shutdown_for_good()

    def linger(self) -> None:
        """Stay until the supervisor closes: rank 0 holds the store that others may still use."""
        while recv_frame(self._control) is not None:
            pass

    def _hear(self, profiler: StepProfiler) -> None:
        """Take what the supervisor has sent, if anything; its end is somebody else's business."""
        there = select.poll()
        there.register(self._control, select.POLLIN)
        while there.poll(0) and (frame := recv_frame(self._control)) is not None:
            if frame[0]["type"] == "profile":
                profiler.ask(frame[0]["number"], frame[0]["steps"])

    def _join(self) -> bool:
        """Meet the other ranks in rank 0's store; False when the run was stopped before."""
        me, ip = self._order.me, self._order.ip
        ports = self._order.ports
        timeout = timedelta(seconds=self._order.join_timeout)
        store = None
        if me.rank == 0:
            # The store takes over a socket that is bound already, so the published port cannot be lost to a race,
            # and it listens on this address only.
            listener = listen(ip, ports)
            store = ip, listener.getsockname()[1]
            self._kv = TCPStore(
                *store, me.size, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach()
            )
        send_frame(self._control, {"type": "ready", "store": store})
        go = recv_frame(self._control)
        if go is None:
            return False
        host, port = go[0]["store"]
        mpi = go[0]["mpi"]
        if mpi is not None:
            os.environ.update(mpi)
            if "PMI_FD" in mpi:
                _, fds, _, _ = socket.recv_fds(self._control, 1, 1)
                os.environ["PMI_FD"] = str(fds[0])
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = host, str(port)
        patience = min(SECONDS, self._order.join_timeout / 2)  # less than the supervisor's, so that it is our words
        try:
            if self._kv is None:
                connect(host, port, "the store of rank 0", f"rank {me.rank} on host {me.host} ({ip})", patience)
                self._kv = TCPStore(host, port, me.size, False, timeout)
            check_hosts(me, ip, self._kv, ports if mpi is not None else None, patience)
            if mpi is not None:
                check_same_mpi(me, self._kv)
        except (UnreachableError, MpiMismatchError) as error:
            raise SetupFailure(str(error), error) from error
        context.join(
            World(me, Endpoint(host, port), self._order.generation, secret=self._order.secret, ports=ports),
            self._kv,
            timeout=self._order.collective_timeout,
            backend=self._settle_gpu(me),
        )
        send_frame(self._control, {"type": "joined"})
        return True

    def _settle_gpu(self, me: RankInfo) -> str | None:
        """Take this rank's GPU, and return the backend that suits those of all ranks."""
        try:
            return settle(me, self._order.gpus, self._kv, self._order.backend)
        except GpuError as error:
            raise SetupFailure(str(error), error) from error
