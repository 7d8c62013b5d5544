"""Who can connect to whom: a small server on each side, and the task that tries the ways a run needs.

The server answers only those who know the token of this examination, and says nothing but what time it is.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import pickle
import socket
import socketserver
import statistics
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from spark_hvd.runner.channel.address import NoAddressError, choose_address, own_addresses
from spark_hvd.runner.diagnosis.facts import host_key
from spark_hvd.runner.outcome.rows import Packed
from spark_hvd.runner.supervise.task import host_of, to_batches
from spark_hvd.world.ports import PortRange, listen

if TYPE_CHECKING:
    import pyarrow
    from pyspark import BarrierTaskContext

CONNECT_SECONDS = 3.0
_PINGS = 10
_TIME = struct.Struct("!d")
TOKEN_BYTES = 32
_STRANGERS = 64
"""Connections that have not shown the token, beyond which the oldest is cut: a thread waits on each."""
ALL_PAIRS_UP_TO = 16
"""Hosts up to which every pair is tried; beyond, each tries its neighbour and the first."""


@dataclass(frozen=True, slots=True)
class Ping:
    """A connection that was tried.

    Attributes:
        error: Why it failed, or None.
        rtt: Median seconds there and back.
        ahead: Seconds by which the other side's clock is ahead of ours.
        local: Our address on this connection.
    """

    error: str | None = None
    rtt: float = 0.0
    ahead: float = 0.0
    local: str = ""


@dataclass(frozen=True, slots=True)
class NetworkPlan:
    """What every task is to try.

    Attributes:
        driver: The driver's (host, port); None where it has none that executors could know.
        ports: Where ranks may listen; None for any port.
        interfaces: The run's ``interfaces``.
        token: What servers and clients of this examination know.
    """

    driver: tuple[str, int] | None
    ports: PortRange | None
    interfaces: Sequence[str]
    token: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class TaskNetwork:
    """What one task found out.

    Attributes:
        partition: Number of the task.
        key: Its machine.
        name: Its machine's own name.
        host: What Spark calls it.
        address: By which other ranks will reach it; None if it has no such address.
        port: Where it listens; None if it cannot.
        bind_error: Why it has no address, or cannot listen there.
        gpus: Addresses of the GPUs that Spark assigned; None without any.
        driver: The way to the driver.
        peers: The ways to tasks on other hosts, by partition.
    """

    partition: int
    key: str
    name: str
    host: str
    address: str | None = None
    port: int | None = None
    bind_error: str | None = None
    gpus: list[str] | None = None
    driver: Ping | None = None
    peers: dict[int, Ping] = field(default_factory=dict)


class EchoServer(socketserver.ThreadingTCPServer):
    """Answers pings of those who know the token, until it is closed.

    Args:
        host: Address to listen on.
        ports: Where to; None for any port.
        token: The secret of this examination.

    Raises:
        OSError: the address is not one of this machine, or no port is free.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, host: str, ports: PortRange | None, token: bytes) -> None:
        listener = listen(host, ports)
        super().__init__(listener.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket, self.server_address = listener, listener.getsockname()
        self.port: int = self.server_address[1]
        self.token = token
        self._strangers: dict[socket.socket, None] = {}
        self._lock = threading.Lock()  # connections come in the server's thread, and end in their own
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,), name="spark_hvd-echo", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering and free the port."""
        self.shutdown()
        self.server_close()
        self._thread.join()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own, of which there are not too many."""
        with self._lock:
            self._strangers[request] = None
            if len(self._strangers) > _STRANGERS:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread reads the end, and closes it
        super().process_request(request, client_address)

    def is_known(self, request: socket.socket) -> None:
        """This one has shown the token, or has ended."""
        with self._lock:
            self._strangers.pop(request, None)

    def shutdown_request(self, request: Any) -> None:
        """See base class."""
        self.is_known(request)
        super().shutdown_request(request)


class _Handler(socketserver.BaseRequestHandler):
    server: EchoServer

    def handle(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self.request.settimeout(10)
            if not hmac.compare_digest(_take(self.request, TOKEN_BYTES), self.server.token):
                return
            self.server.is_known(self.request)
            while True:
                _take(self.request, _TIME.size)
                self.request.sendall(_TIME.pack(time.time()))


def _take(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        if not (piece := connection.recv(count - len(data))):
            raise ConnectionResetError("the other side closed the connection")
        data += piece
    return data


def ping(host: str, port: int, token: bytes, timeout: float = CONNECT_SECONDS) -> Ping:
    """Connect to an :class:`EchoServer` and measure the way; never raises for the network.

    Args:
        host: Name or address of the other side.
        port: Its port.
        token: The secret of this examination.
        timeout: Seconds for the connection, and for each answer.
    """
    try:
        with socket.create_connection((host, port), timeout) as connection:
            connection.settimeout(timeout + CONNECT_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(token)
            waits, offsets = [], []
            for _ in range(_PINGS + 1):
                start, before = time.perf_counter(), time.time()
                connection.sendall(_TIME.pack(0.0))
                (there,) = _TIME.unpack(_take(connection, _TIME.size))
                waits.append(time.perf_counter() - start)
                offsets.append(there - before - waits[-1] / 2)
            # the first answer also waits for the thread that gives it
            return Ping(None, statistics.median(waits[1:]), statistics.median(offsets[1:]), connection.getsockname()[0])
    except OSError as error:
        return Ping(f"{type(error).__name__}: {error.strerror or error}")


def targets(index: int, count: int) -> list[int]:
    """Which of ``count`` hosts number ``index`` tries to reach: all others, or of many its neighbour and the first."""
    if count <= ALL_PAIRS_UP_TO:
        return [other for other in range(count) if other != index]
    return sorted({0, (index + 1) % count} - {index})


def run_network_task(plan: NetworkPlan, payload: bytes) -> Iterator[pyarrow.RecordBatch]:
    """Yield what one barrier task has found out; there is no payload."""
    from pyspark import BarrierTaskContext

    context = BarrierTaskContext.get()
    assert isinstance(context, BarrierTaskContext)
    yield from to_batches([Packed(context.partitionId(), True, pickle.dumps(_examine(plan, context)))], None)


def _examine(plan: NetworkPlan, context: BarrierTaskContext) -> TaskNetwork:
    """Try, from inside a barrier task, the ways that a rank in its place will need.

    Takes two of Spark's barrier messages, a second each, and at most ten seconds where nobody answers.
    """
    partition, gpus = context.partitionId(), context.resources().get("gpu")
    hosts = [host_of(info.address) for info in context.getTaskInfos()]
    me: dict[str, Any] = {
        "partition": partition,
        "key": host_key(),
        "name": socket.gethostname(),
        "host": hosts[partition],
        "gpus": None if gpus is None else list(gpus.addresses),
    }
    server = None
    try:
        towards = None if plan.driver is None else plan.driver[0]
        alone = len(set(hosts)) == 1
        me["address"] = choose_address(me["host"], plan.interfaces, towards, alone=alone, own=own_addresses()).ip
        server = EchoServer(me["address"], plan.ports, plan.token)
        me["port"] = server.port
    except NoAddressError as error:
        me["bind_error"] = str(error)
    except OSError as error:
        me["bind_error"] = f"{type(error).__name__}: {error.strerror or error}"
    try:
        driver = None if plan.driver is None else ping(*plan.driver, plan.token)
        everyone = [json.loads(card) for card in context.allGather(json.dumps(me))]
        peers = _try_peers(plan, me, everyone)
        context.barrier()  # nobody stops listening before all have tried
    finally:
        if server is not None:
            server.close()
    return TaskNetwork(**me, driver=driver, peers=peers)


def _try_peers(plan: NetworkPlan, me: dict[str, Any], everyone: Sequence[dict[str, Any]]) -> dict[int, Ping]:
    """Connect to one task on each host that this one is to try; only the first task of a host does."""
    first: dict[str, dict[str, Any]] = {}
    for card in everyone:
        first.setdefault(card["key"], card)
    if first[me["key"]]["partition"] != me["partition"]:
        return {}
    hosts = list(first.values())
    index = [card["key"] for card in hosts].index(me["key"])
    chosen = [hosts[other] for other in targets(index, len(hosts)) if hosts[other].get("port")]
    # On its own host it tries the last task there: ranks of one host connect to each other as well.
    same_host = [card for card in everyone if card["key"] == me["key"] and card.get("port")]
    chosen += same_host[-1:]
    with ThreadPoolExecutor(16, "spark_hvd-ping") as pool:
        pings = pool.map(lambda card: ping(card["address"], card["port"], plan.token), chosen)
        return dict(zip((card["partition"] for card in chosen), pings, strict=True))
