"""Strangers on the network: if they replace a pickle between ranks, it is not unpickled."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import struct
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch

import spark_hvd.torch as hvd
from spark_hvd.collectives import objects
from spark_hvd.context import global_state
from spark_hvd.context import init as context
from spark_hvd.transport import groups
from spark_hvd.transport.torch_private import Store, TCPStore
from spark_hvd.world.layout import Endpoint, World, WorldLayout
from tests.ranks import Ranks, ranks

cloudpickle.register_pickle_by_value(sys.modules[__name__])

GROUP = "spark_hvd/0/0/groups/spark_hvd.1.0//cpu//0"
"""Where the ranks of the first process set look for each other."""
HEADER = 8
"""Bytes by which Gloo's connecting side names the connection of the other side that it means."""
MARK = "0123456789abcdef" * 32 + "." * 2000  # too large to be sent with the decision
_PORT_AT = 20
"""Offset of the port in what Gloo writes into the store on a host named "vm"; the name's length is added."""


def join_with_secret() -> None:
    """Join a world as a launcher forms it, with a secret that no stranger knows."""
    rank, size, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    kv = TCPStore("127.0.0.1", port, size, rank == 0, timedelta(seconds=60), wait_for_workers=False)
    me = WorldLayout.from_hosts(["127.0.0.1"] * size).of_process(rank)
    context.join(World(me, Endpoint("127.0.0.1", port), secret=b"s" * 32), kv, timeout=60)


@pytest.fixture(scope="module")
def sealed() -> Any:
    with ranks(2, join=False) as world:
        world.run(join_with_secret)
        yield world


class Runs:
    """A pickle that leaves a file behind if it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return open, (str(self.path), "w")


class Attacker(threading.Thread):
    """Reaches rank 0's store and nothing else, has no key, and intercepts ranks 0 and 1 of a process set.

    Args:
        port: The store's port.
        evil: Replaces the first pickle that contains the mark; as long, or shorter.
    """

    def __init__(self, port: int, evil: bytes) -> None:
        super().__init__(daemon=True)
        self.store: Store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60))
        self.evil = evil
        self.replaced = False
        self.listeners = [_low_listener(), _low_listener()]

    def run(self) -> None:
        """Replace both addresses, accept both connections, and forward everything but one pickle."""
        true = self.store.get(f"{GROUP}/1")
        for rank, listener in enumerate(self.listeners):
            at = _PORT_AT - len("vm") + struct.unpack("<Q", true[:8])[0]
            port = struct.pack(">H", listener.getsockname()[1])
            self.store.set(f"{GROUP}/{rank}", true[:at] + port + true[at + 2 :])
        one, _ = self.listeners[0].accept()  # the peer that connects to rank 0's address is rank 1
        self.store.set("stranger/ready", "")
        zero, _ = self.listeners[1].accept()
        for each in (one, zero):
            each.recv(HEADER, socket.MSG_WAITALL)
        back = threading.Thread(target=self._pass, args=(zero, one), daemon=True)
        back.start()
        self._pass(one, zero)
        back.join()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                start = data.find(b"\x80\x05")
                if start >= 0 and MARK.encode() in data and not self.replaced:
                    data = data[:start] + self.evil + data[start + len(self.evil) :]
                    self.replaced = True
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)


def _low_listener() -> socket.socket:
    """Of two ranks, the one with the greater address connects, and Gloo compares ports with swapped bytes."""
    for port in range(0x4000, 0x8000, 0x100):
        with contextlib.suppress(OSError):
            return socket.create_server(("127.0.0.1", port))
    raise RuntimeError("no free port")


def test_a_stranger_who_reaches_the_store_runs_no_code(tmp_path: Path) -> None:
    def victim() -> str:
        if hvd.rank() == 0:  # this rank is a little late, so that the stranger need not be fast
            make, kv = groups.Groups.make_known, global_state.current().kv

            def late(*args: Any) -> Any:
                TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), None, False).get("stranger/ready")
                return make(*args)

            assert kv is not None
            groups.Groups.make_known = late  # type: ignore[method-assign]
        both = hvd.add_process_set([0, 1])
        if not both.included():
            return "not concerned"
        try:
            assert hvd.broadcast_object(MARK if hvd.rank() else None, root_rank=1, process_set=both) == MARK
        except hvd.CollectiveError as error:
            return str(error)
        return "all is well"

    proof = tmp_path / "proof"
    evil = pickle.dumps(Runs(proof))
    pickle.loads(evil).close()
    proof.unlink()  # it works, but must not run here
    with ranks(3, join=False) as world:
        world.run(join_with_secret)
        attacker = Attacker(int(world.run(lambda: os.environ["MASTER_PORT"])[0]), evil)
        attacker.start()
        zero, one, _ = world.run(victim)
        assert attacker.replaced
        assert not proof.exists()
        assert "rank 0 got a pickle from rank 1" in zero
        assert "not unpickled" in zero
        assert one == "all is well"
        for listener in attacker.listeners:
            listener.close()


def swapped(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """From now on, change this rank's pickles in transit, after they were sealed."""
    broadcast, allgather = objects.start_broadcast, objects.start_allgather

    def changed(start: Any) -> Any:
        def starting(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            return start(
                [change(tensors[0])] if tensors[0].dtype == torch.uint8 and tensors[0].numel() else tensors,
                *args,
                **kwargs,
            )

        return starting

    objects.start_broadcast, objects.start_allgather = changed(broadcast), changed(allgather)


EVERY = ("another", "bit", "cut", "earlier")


@pytest.mark.parametrize("what", EVERY)
def test_what_was_changed_on_its_way_is_not_unpickled(sealed: Ranks, tmp_path: Path, what: str) -> None:
    proof = tmp_path / "proof"

    def fn() -> list[str]:
        earlier: list[torch.Tensor] = []

        def change(true: torch.Tensor) -> torch.Tensor:
            data = bytearray(true.numpy().tobytes())
            if what == "another":
                evil = pickle.dumps(Runs(proof))
                data[: len(evil)] = evil
            elif what == "bit":
                data[len(data) // 2] ^= 1
            elif what == "cut":
                data[-100:] = bytes(100)
            elif earlier:  # replay a call of the same name and length
                return earlier[0]
            else:
                earlier.append(true.clone())
            return torch.frombuffer(data, dtype=torch.uint8)

        saved = objects.start_broadcast, objects.start_allgather
        found = []
        try:
            if hvd.rank() == 1:
                swapped(change)
            for call in (
                lambda number: hvd.broadcast_object(MARK + number if hvd.rank() else None, 1, "named"),
                lambda number: hvd.allgather_object(MARK + number, "gathered")[1],
            ):
                earlier.clear()
                for number in "12":
                    try:
                        assert call(number) == MARK + number
                    except hvd.CollectiveError as error:
                        found.append(str(error))
        finally:
            objects.start_broadcast, objects.start_allgather = saved
        return found

    zero, _ = sealed.run(fn)
    assert len(zero) == (2 if what == "earlier" else 4)
    assert all("rank 0 got a pickle from rank 1" in text and "not unpickled" in text for text in zero)
    assert not proof.exists()
    assert sealed.run(lambda: hvd.allgather_object(hvd.rank())) == [[0, 1]] * 2
