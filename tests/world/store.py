"""A generation's key-value store, in place of torch's TCPStore: one rank's process serves it, and others connect."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from tests.world.clock import me, strand

if TYPE_CHECKING:
    from tests.world.ranks import RankProcess


class StoreServer:
    """A server; it is gone when its process is."""

    def __init__(self, process: RankProcess, port: int) -> None:
        self.process, self.port = process, port
        self.data: dict[str, bytes] = {}
        self.waiting: list[RankProcess] = []
        self.closed = False

    def close(self) -> None:
        """End it with its process."""
        self.closed = True
        self.process.world.stores.pop((self.process.host, self.port), None)
        for process in self.waiting:
            process.strand.poke()

    def set(self, key: str, value: bytes) -> None:
        """Store a value."""
        self.data[key] = value
        for process in self.waiting:
            process.strand.poke()


class Listener:
    """A listening port."""

    def __init__(self, process: RankProcess, port: int) -> None:
        self._address = process.host, port

    def getsockname(self) -> tuple[str, int]:
        return self._address

    def detach(self) -> int:
        return self._address[1]


def listen(ip: str, ports: Any) -> Listener:
    """Replaces :func:`spark_hvd.world.ports.listen`."""
    return Listener(me(), me().world.next_pid())


def connect(address: tuple[str, int], seconds: float) -> StoreServer:
    """Connect to a server.

    Raises:
        OSError: There is no listener.
    """
    process, network = me(), me().world.network
    if not network.reaches(process.host, address[0]):
        strand().wait(lambda: False, seconds)
        raise TimeoutError("timed out")
    strand().wait(lambda: False, network.latency * network.clock.random.random())
    server: StoreServer | None = process.world.stores.get(address)
    if server is None:
        raise ConnectionRefusedError("Connection refused")
    return server


class Connection:
    """Replaces ``socket.create_connection``: it only matters whether a connection exists."""

    def __init__(self, address: tuple[str, int], seconds: float) -> None:
        connect(address, seconds)

    def close(self) -> None:
        pass


class SimulatedStore:
    """Replaces ``torch.distributed.TCPStore``: a client of its own process's server or another's."""

    def __init__(
        self, host: str, port: int, size: None, is_master: bool, timeout: timedelta, *_: Any, **listening: Any
    ) -> None:
        self._process, self._timeout = me(), timeout.total_seconds()
        if is_master:
            self._server = StoreServer(self._process, port)
            self._process.servers.append(self._server)
            self._process.world.stores[host, port] = self._server
        else:
            self._server = connect((host, port), self._timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout.total_seconds()

    def set(self, key: str, value: str) -> None:
        self._ask(lambda: True)
        self._server.set(key, value.encode())

    def multi_get(self, keys: list[str]) -> list[bytes]:
        data = self._server.data
        self._ask(lambda: all(key in data for key in keys))
        return [data[key] for key in keys]

    def _ask(self, answered: Any) -> None:
        """Wait for an answer.

        Raises:
            RuntimeError: No answer arrives.
        """
        server, process = self._server, self._process
        network, registry = process.world.network, process.global_state.registry
        server.waiting.append(process)

        def cut() -> bool:
            return registry is not None and registry.broken is not None

        def settled() -> bool:
            there = network.reaches(process.host, server.process.host)
            return cut() or (there and (server.closed or answered()))

        strand().wait(lambda: False, network.latency * network.clock.random.random())
        in_time = strand().wait(settled, self._timeout)
        server.waiting.remove(process)
        if not in_time:
            raise RuntimeError("wait timeout after the store's seconds")
        if cut() or server.closed:
            raise RuntimeError("Connection reset by peer")


class PrefixStore:
    """A part of a store."""

    def __init__(self, prefix: str, store: Any) -> None:
        self._prefix, self._store = prefix, store

    def set(self, key: str, value: str) -> None:
        self._store.set(f"{self._prefix}/{key}", value)

    def multi_get(self, keys: list[str]) -> list[Any]:
        return self._store.multi_get([f"{self._prefix}/{key}" for key in keys])
