"""Strangers at a live coordinator: wrong keys, garbage, oversize messages and floods change nothing for its world."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import cloudpickle
import psutil
import pytest
import torch
import zmq

import spark_hvd.torch as hvd
from spark_hvd.collectives.messages import decode
from spark_hvd.context import global_state
from spark_hvd.engine.channel import MAX_MESSAGE
from spark_hvd.engine.curve import Keys
from spark_hvd.engine.service import Coordination
from spark_hvd.world.config import Config
from tests.ranks import Ranks, ranks

cloudpickle.register_pickle_by_value(sys.modules[__name__])

GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
"""The start of a ZMTP 3 peer that uses CURVE (https://rfc.zeromq.org/spec/23)."""
LIE = json.dumps([1, "left", 0]).encode()
"""If rank 1 sent it, it would end the world."""


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with ranks(2) as world:
        yield world


def endpoints_of(world: Ranks) -> list[str]:
    def find() -> list[str]:
        (coordination,) = global_state.current().engine._coordinations
        assert coordination.sockets is not None
        return coordination.sockets.endpoints

    return list(world.run(lambda: find() if hvd.rank() == 0 else [])[0])


def raw(endpoint: str, data: bytes) -> socket.socket:
    host, port = endpoint.removeprefix("tcp://").rsplit(":", 1)
    stranger = socket.create_connection((host, int(port)), timeout=30)
    stranger.sendall(data)
    return stranger


def collectives(stop: Callable[[], bool]) -> int:
    """Run collectives until all ranks are told to stop; each result must be correct."""
    steps = 0
    while steps < 20 or not stop():
        steps += 1
        sums = hvd.allreduce(torch.full((100,), float(steps)), op=hvd.Sum, name=f"step {steps % 7}")
        assert sums.tolist() == [2.0 * steps] * 100
        assert hvd.broadcast_object(steps if hvd.rank() == 0 else None) == steps
    return steps


def under_attack(world: Ranks, attack: Callable[[], None], folder: Any) -> None:
    """Check that collectives stay correct during and after a stranger's actions."""
    flag = str(folder / "over")

    def stop() -> bool:
        return bool(hvd.broadcast_object(os.path.exists(flag)))

    steps: list[int] = []
    training = threading.Thread(target=lambda: steps.extend(world.run(collectives, stop)))
    training.start()
    try:
        attack()
    finally:
        open(flag, "w").close()
        training.join()
    assert len(set(steps)) == 1
    assert steps[0] >= 20


def wrong_keys(endpoints: list[str]) -> None:
    other = Keys.of(b"another world's secret")
    public, secret = zmq.curve_keypair()

    def unknown(each: Any) -> None:  # would need the coordinator's public key, which strangers do not have
        each.curve_serverkey = other.server_public
        each.curve_publickey, each.curve_secretkey = public, secret

    def former(each: Any) -> None:
        each.curve_serverkey = other.server_public
        each.curve_publickey, each.curve_secretkey = other.member_public, other.member_secret

    def plain(each: Any) -> None:
        each.plain_username, each.plain_password = b"rank 1", b"please"

    with zmq.Context() as strangers:
        for settings in (unknown, former, plain, lambda each: None):
            for kind, endpoint in zip((zmq.PUSH, zmq.SUB), endpoints, strict=True):
                with strangers.socket(kind) as each:
                    each.linger, each.rcvtimeo, each.sndtimeo, each.immediate = 0, 300, 300, 1
                    settings(each)
                    if kind == zmq.SUB:
                        each.subscribe(b"")
                    each.connect(endpoint)
                    with pytest.raises(zmq.Again):  # there is no peer to send to, and nothing arrives
                        each.send(LIE) if kind == zmq.PUSH else each.recv()


def garbage(endpoints: list[str]) -> None:
    dice = random.Random(3)
    for endpoint in endpoints:
        for data in (
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            b"\xff" * 1000,
            GREETING + LIE,
            GREETING + b"\x04\x19\x05READY" + bytes(200),
            *(GREETING[:10] + dice.randbytes(dice.randint(1, 3000)) for _ in range(30)),
            *(dice.randbytes(dice.randint(1, 3000)) for _ in range(30)),
        ):
            raw(endpoint, data).close()


def half_open(endpoints: list[str]) -> None:
    strangers = [raw(endpoint, GREETING[: number % 12]) for number in range(100) for endpoint in endpoints]
    for stranger in strangers:
        stranger.close()


@pytest.mark.parametrize("attack", [wrong_keys, garbage, half_open])
def test_collectives_go_on(two: Ranks, tmp_path: Any, attack: Callable[[list[str]], None]) -> None:
    endpoints = endpoints_of(two)
    under_attack(two, lambda: attack(endpoints), tmp_path)


def test_no_memory_is_set_aside_for_what_strangers_announce(two: Ranks, tmp_path: Any) -> None:
    rank_0 = psutil.Process(two.run(os.getpid)[0])
    before, most = rank_0.memory_info().vms, 0

    def announce() -> None:
        nonlocal most
        for endpoint in endpoints:
            stranger = raw(endpoint, GREETING + b"\x06" + (64 * MAX_MESSAGE).to_bytes(8, "big") + bytes(100))
            stranger.settimeout(0.05)
            closed = False
            while not closed:  # at once, or when the handshake times out
                most = max(most, rank_0.memory_info().vms)
                try:
                    closed = not stranger.recv(1 << 16)
                except TimeoutError:
                    continue
                except ConnectionResetError:
                    closed = True
            stranger.close()

    endpoints = endpoints_of(two)
    under_attack(two, announce, tmp_path)
    assert most - before < 32 * MAX_MESSAGE


def test_decoders_raise_ordinary_errors() -> None:
    """Input from a peer with the key, perhaps of another version, ends the world with a named error, and only that."""
    dice = random.Random(15)
    whole = [
        b'[1,"ready","3",[["a",["allreduce",["float32"],[[2]],"cpu","SUM",1.0,1.0,null,null,null,null]]]]',
        b'[1,"join",true]',
        b'[1,"left",3]',
        b'[1,"failed","why"]',
        b'[1,"ping",3]',
        b'[["Run",[["a",["allreduce",["float32"],[[2]],"cpu","SUM",1.0,1.0,null,null,null,null],null,null,null,null]]]]',
        b'[["RunKnown","ff"],["AllJoined",1],["Gone",1,"x",true,null],["Tune",3],["Pong",1,2,3]]',
    ]
    queue: Any = SimpleNamespace(
        ranks=[0, 1],
        members=SimpleNamespace(hosts=["a", "b"]),
        tracing=SimpleNamespace(recorder=None),
        memory=SimpleNamespace(ids=0, last=lambda place: None),
        apply=lambda decisions: None,
    )
    heard = 0
    for number in range(4000):
        data = bytearray(whole[number % len(whole)])
        for _ in range(dice.randint(0, 3)):
            at = dice.randrange(len(data))
            data[at : at + dice.randint(0, 3)] = dice.choice(
                (b"", b"-1", b"null", b"[", b"]", b'"', b"1e999", b"{}", b"\xff")
            )
        sockets: Any = SimpleNamespace(receive=iter([bytes(data), None]).__next__, send=lambda decisions: None)
        with contextlib.suppress(ValueError):
            Coordination(queue, Config(), sockets).read_requests()
            heard += 1
        try:
            decode(bytes(data))
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
            continue
    assert heard > 100
