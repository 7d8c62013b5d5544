"""A rank of a run whose ranks all start together: connects to them once, runs fn, and stays until all have ended."""

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
from spark_hvd.runner.rank.own_gpu import settle
from spark_hvd.runner.rank.process import RandomState, SetupFailure, call, unpickle_call
from spark_hvd.runner.rank.reporting import VitalsSender
from spark_hvd.runner.rank.spec import RankSpec
from spark_hvd.transport.rendezvous import all_gather_facts
from spark_hvd.transport.torch_private import PrefixStore, Store, TCPStore
from spark_hvd.world.layout import Endpoint, RankInfo, World
from spark_hvd.world.ports import PortRange, listen

SECONDS = 15.0
"""Seconds that a connection may take."""
_RETRY_SECONDS = 0.2


class UnreachableError(RuntimeError):
    """A rank cannot connect to another."""


def connect(host: str, port: int, peer: str, mine: str, seconds: float = SECONDS) -> None:
    """Open a connection to a rank, and close it.

    Raises:
        UnreachableError: The connection failed. The message names both ends and what to check.
    """
    until = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, port), timeout=max(until - time.monotonic(), 0.1)).close()
            return
        except OSError as error:
            if time.monotonic() + _RETRY_SECONDS >= until:
                raise UnreachableError(
                    f"{mine} cannot reach {peer} at {host}:{port} ({error}; tried for {seconds:.0f} s). Check that the "
                    "network between the two hosts is up and lets this port through (ranks listen on ports=, Gloo and "
                    "NCCL on the kernel's net.ipv4.ip_local_port_range), and that the address is on the right network "
                    "(interfaces= chooses another)."
                ) from error
        time.sleep(_RETRY_SECONDS)


def check_hosts(me: RankInfo, ip: str, kv: Store, ports: PortRange | None, seconds: float = SECONDS) -> None:
    """Let the first rank of every host connect to the first rank of the next host, in a ring.

    So one other host tries each host's address, and a wrong interface or a firewall around one host is found and named.
    ``ip`` is this rank's address. ``ports`` are those on which to listen; None means any. ``seconds`` limits the
    attempt.

    Raises:
        UnreachableError: This rank cannot connect.
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
        kv.get(f"reached/{me.cross_rank}")  # keep listening until the previous host has connected


class MpiMismatchError(RuntimeError):
    """The hosts have different MPI libraries, or a host has none."""


def library_version() -> str:
    """Return name and version of the MPI library that mpi4py has loaded, without initialising MPI.

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
        MpiMismatchError: The libraries differ, or a rank has none. Every rank raises it, naming hosts and versions.
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
            f"the hosts have different MPI libraries: {listed}. Install the same library on all, for example from one "
            "environment that you ship with the application (spark.archives)."
        )


class StaticRank:
    """See the module's description."""

    def __init__(self, control: socket.socket, spec: RankSpec) -> None:
        self._control = control
        self._spec = spec
        self.rank: int = spec.me.rank
        self._kv: Any = None
        self._ended_well = False

    def run(self, payload: bytes | memoryview) -> Any:
        """Connect to the other ranks, and call fn."""
        fn, args, kwargs = unpickle_call(payload, RandomState(self._spec.seed, self._spec.stream))
        if not self._join():
            sys.exit(1)  # the supervisor closed the connection: another rank failed before all had met
        reporting = VitalsSender(
            lambda kind, **fields: send_frame(self._control, {"type": kind, **fields}),
            lambda: self._hear(reporting.profiler),
        )
        if self._spec.watched:
            reporting.start()
        try:
            value = call(fn, args, kwargs)
        finally:
            reporting.stop()
        self._ended_well = True
        return value

    def leave(self) -> None:
        """Leave the world as soon as fn has returned, because peers may still wait for this rank.

        If fn failed, the rank stays until it is killed, so that no peer reports its absence as an error.
        """
        if self._ended_well:
            leave.shutdown_for_good()

    def linger(self) -> None:
        """Stay until the supervisor closes the connection; rank 0 has the store, which others may still use."""
        while recv_frame(self._control) is not None:
            pass

    def _hear(self, profiler: StepProfiler) -> None:
        """Handle the supervisor's messages, if there are any. Other code notices the end of the connection."""
        poller = select.poll()
        poller.register(self._control, select.POLLIN)
        while poller.poll(0) and (frame := recv_frame(self._control)) is not None:
            if frame[0]["type"] == "profile":
                profiler.ask(frame[0]["number"], frame[0]["steps"])

    def _join(self) -> bool:
        """Connect to the other ranks through rank 0's store, and return False if the run was stopped first."""
        me, ip = self._spec.me, self._spec.ip
        ports = self._spec.ports
        timeout = timedelta(seconds=self._spec.join_timeout)
        store = None
        if me.rank == 0:
            # The store takes over a socket that is already bound. So no other process can take the published port, and
            # the store listens on this address only.
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
        seconds = min(SECONDS, self._spec.join_timeout / 2)  # less than the supervisor's, whose error says less
        try:
            if self._kv is None:
                connect(host, port, "the store of rank 0", f"rank {me.rank} on host {me.host} ({ip})", seconds)
                self._kv = TCPStore(host, port, me.size, False, timeout)
            check_hosts(me, ip, self._kv, ports if mpi is not None else None, seconds)
            if mpi is not None:
                check_same_mpi(me, self._kv)
        except (UnreachableError, MpiMismatchError) as error:
            raise SetupFailure(str(error), error) from error
        context.join(
            World(me, Endpoint(host, port), self._spec.generation, secret=self._spec.secret, ports=ports),
            self._kv,
            timeout=self._spec.collective_timeout,
            backend=self._settle_gpu(me),
        )
        send_frame(self._control, {"type": "joined"})
        return True

    def _settle_gpu(self, me: RankInfo) -> str | None:
        """Take this rank's GPU, and return a backend that suits the GPUs of all ranks."""
        try:
            return settle(me, self._spec.gpus, self._kv, self._spec.backend)
        except GpuError as error:
            raise SetupFailure(str(error), error) from error
