"""Whatever ends a hub's work ends the run with an error that says so, however it was started; a stranger cannot."""

from __future__ import annotations

import contextlib
import io
import json
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import zmq

from spark_hvd.runner import HubError, run, run_elastic, run_elastic_local, run_local
from spark_hvd.runner.channel.hub import Hub, HubServer
from spark_hvd.runner.channel.link import Link
from spark_hvd.runner.channel.state import HubState
from spark_hvd.runner.config import Reporting
from spark_hvd.runner.elastic.hub import ElasticState
from spark_hvd.runner.elastic.membership.events import Limits
from tests.conftest import wait_until
from tests.strangers import GREETING

Launcher = Callable[..., list[Any]]
pytestmark = pytest.mark.usefixtures("no_leaks")
cloudpickle.register_pickle_by_value(sys.modules[__name__])
MALFORMED = (
    b"\xff",
    b"[]",
    b"{}",
    b'{"type": "surprise", "rank": 0}',
    b'{"type": "ended", "rank": 0}',
    b'{"type": "alive", "rank": 0, "sequence": "1"}',
)


@pytest.fixture(scope="module", params=["run_local", "run_elastic_local", "run", "run_elastic"])
def launch(request: pytest.FixtureRequest) -> Launcher:
    if "local" in request.param:
        return {"run_local": run_local, "run_elastic_local": run_elastic_local}[request.param]
    spark = request.getfixturevalue("spark")
    start: Callable[..., Any] = {"run": run, "run_elastic": run_elastic}[request.param]
    return lambda *args, **kwargs: start(*args, spark=spark, **kwargs)


@pytest.fixture
def hubs(monkeypatch: pytest.MonkeyPatch) -> list[HubServer]:
    """The hubs that are created from now on."""
    made: list[HubServer] = []
    begin = HubServer.__init__

    def init(self: HubServer, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(HubServer, "__init__", init)
    return made


@contextlib.contextmanager
def connected(hub: HubServer, rank: int = 0) -> Iterator[Link]:
    link = Link(hub.address, rank)
    try:
        assert link.wait_connected(10.0)
        yield link
    finally:
        link.close()


def fails(launch: Launcher, inject: Callable[[], None], match: str) -> None:
    """Start two ranks that sleep, and cause a HubError."""

    def fn() -> None:
        print("up", flush=True)
        time.sleep(600)

    out = io.StringIO()

    def later() -> None:
        wait_until(lambda: out.getvalue().count("up") == 2, 200)
        inject()

    thread = threading.Thread(target=later)
    thread.start()
    with pytest.raises(HubError, match=match):
        launch(fn, num_proc=2, reporting=Reporting(stdout=out), timeout=240)
    thread.join()


def test_a_malformed_message_ends_the_run(launch: Launcher, hubs: list[HubServer]) -> None:
    def inject() -> None:
        with connected(hubs[-1]) as link:
            link.socket.send(b'{"type": "ended", "rank": 0, "ok": "yes"')

    fails(launch, inject, "the driver got a malformed message .* install the same one")


def test_a_defect_of_the_hub_ends_the_run(
    launch: Launcher, hubs: list[HubServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def tick(self: object, now: float) -> list[Any]:
        raise KeyError("injected")

    def inject() -> None:
        for state in (HubState, ElasticState):
            monkeypatch.setattr(state, "tick", tick)
            monkeypatch.setattr(state, "stop", tick)

    fails(launch, inject, r"the hub of this run failed \(KeyError: 'injected'\)")


# ---- one hub, without a run ---------------------------------------------------------------------------------------


@pytest.fixture(params=["static", "elastic"])
def hub(request: pytest.FixtureRequest) -> Iterator[HubServer]:
    limits = Limits(num_proc=2, min_num_proc=1, max_num_proc=2)
    server = HubServer(HubState(2) if request.param == "static" else ElasticState(limits), "127.0.0.1")
    yield server
    server.close()


@pytest.mark.parametrize("body", MALFORMED)
def test_a_malformed_message_is_named(hub: HubServer, body: bytes) -> None:
    with connected(hub) as link:
        link.socket.send(body)
        wait_until(lambda: hub.failure is not None)
    assert "malformed message" in str(hub.failure)


def test_the_tasks_are_told(hub: HubServer) -> None:
    with connected(hub) as link, connected(hub, 1) as other:
        for each in (link, other):
            each.send("hello", attempt=7, host="h", task=each.rank)
        link.socket.send(b"?")
        kinds: set[str] = set()

        def told() -> bool:
            kinds.update(message["type"] for message in iter(other.receive, None))
            return bool(kinds & {"stop", "end"})

        wait_until(told)


FIELDS: dict[str, list[Any]] = {
    "type": [*HubState.KINDS, *ElasticState.KINDS, "output", "vitals", "examined", "odd", 7, None, []],
    "rank": [0, 1, 2, -1, 10**30, "0", None, 0.5, [0], True],
    "store": [["h", 1], ["h"], "h", [1, "h"], None, []],
    "loss": ["failed", "lost", "odd", None, 3],
    "vitals": [{}, {"rank": 0, "size": 10**9, "generation": 0, "clock": 0.0}, [], None],
    "stream": ["out", "odd"],
    "sequence": [1, 2, -1, 10**30, "1", None],
}
ANY = [0, 1, -1, 10**30, 0.5, True, False, None, "", "x" * 1000, [], [[]], {}, {"a": 1}]
NAMES = [
    *HubState.KINDS["ended"],
    *HubState.KINDS["relay"],
    *ElasticState.KINDS["ended"],
    "commits",
    "why",
    "text",
    "task",
]


def test_a_fuzzed_hub_answers_or_says_why_not(hub: HubServer) -> None:
    dice = random.Random(14)
    with connected(hub) as link:
        for _ in range(3000):
            names = ["type", "rank", *dice.sample([*FIELDS, *NAMES], dice.randrange(12))]
            body = json.dumps({name: dice.choice(FIELDS.get(name, ANY)) for name in names}).encode()
            for _ in range(dice.choice([0, 0, 0, 1, 5])):
                at = dice.randrange(len(body))
                body = body[:at] + bytes([dice.randrange(256)]) + body[at + dice.randrange(3) :]
            with contextlib.suppress(zmq.Again):
                link.socket.send(body)
        wait_until(lambda: hub.failure is not None)
    asked = threading.Event()
    hub._ask(lambda: asked.set() or [])
    assert asked.wait(5), "it still answers the driver"
    assert "malformed" in str(hub.failure)


def test_well_formed_messages_in_any_order_leave_a_hub_alive() -> None:
    hub = Hub(HubState(2), "127.0.0.1")
    dice = random.Random(15)
    values: dict[Any, list[Any]] = {int: [0, 1, 2], str: ["a", "b"], bool: [True, False], dict: [{}], list: [["h", 1]]}
    with connected(hub) as link:
        for _ in range(1000):
            kind = dice.choice([*HubState.KINDS])
            message: dict[str, Any] = {"type": kind, "rank": dice.choice([0, 1])}
            for name, type_ in HubState.KINDS[kind].items():
                message[name] = dice.choice(values[type_ if isinstance(type_, type) else type_.__args__[0]])
            link.socket.send(json.dumps(message).encode())
        link.send("alive")
        wait_until(lambda: any(m.get("type") == "alive" for m in iter(link.receive, None)) or hub.failure is not None)
    hub.close()
    assert hub.failure is None


def test_vitals_of_more_ranks_than_the_run_has_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    sizes: list[int] = []
    told: Any = lambda rank, record: sizes.append(record.size)  # noqa: E731
    hub = Hub(HubState(2), "127.0.0.1", listener=told)
    try:
        with connected(hub) as link:
            record = {"rank": 0, "generation": 0, "clock": 1.0}
            for size in (10**9, "2", 3, 2):
                link.send("vitals", vitals={**record, "size": size})
            wait_until(lambda: sizes == [2])
    finally:
        hub.close()
    assert hub.failure is None
    assert caplog.text.count("cannot be shown") == 1


def test_a_flood_of_output_does_not_starve_the_driver(hub: HubServer) -> None:
    ending = threading.Event()

    def flood() -> None:
        with connected(hub) as link:
            while not ending.is_set():
                link.try_send("output", stream="out", text="again")

    threads = [threading.Thread(target=flood) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(5):
            asked = threading.Event()
            hub._ask(lambda asked=asked: asked.set() or [])  # type: ignore[misc]
            assert asked.wait(5), "the hub does nothing but take messages"
    finally:
        ending.set()
        for thread in threads:
            thread.join()


RUN_UNDER_ATTACK = """
import resource, subprocess, sys, time
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
from spark_hvd.runner.channel.hub import HubServer
from spark_hvd.runner import run_local
begin = HubServer.__init__
def init(self, *args, **kwargs):
    begin(self, *args, **kwargs)
    print("port", self.address.port, flush=True)
    sys.stdin.readline()  # the attack has begun
HubServer.__init__ = init
def fn():
    import torch, spark_hvd.torch as hvd
    for step in range(40):
        value = float(hvd.allreduce(torch.ones(1), op=hvd.Sum))
        time.sleep(0.1)
    return value
started = time.process_time()
result = run_local(fn, num_proc=2, timeout=60, verbose=0)
with open("/dev/null"):
    print(list(result), f"{time.process_time() - started:.1f} s of CPU", flush=True)
"""


@pytest.mark.night
def test_a_run_under_attack_ends_right() -> None:
    """The driver has few descriptors; strangers hold more connections than that, and send garbage."""
    driver = subprocess.Popen(
        [sys.executable, "-c", RUN_UNDER_ATTACK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert driver.stdin is not None
    assert driver.stdout is not None
    _, port = driver.stdout.readline().split()
    strangers = subprocess.Popen([sys.executable, str(Path(__file__).parents[1] / "strangers.py"), port, "60"])
    try:
        time.sleep(2.0)
        driver.stdin.write("\n")
        driver.stdin.flush()
        values = driver.stdout.readline()
        assert driver.wait(60) == 0
    finally:
        driver.kill()
        strangers.kill()
        driver.wait()
        strangers.wait()
    assert values.startswith("[2.0, 2.0]"), values
    print(values)


@pytest.mark.parametrize("size", [5 << 20, 1 << 40])
def test_a_size_that_no_message_has_is_refused_at_once(hub: HubServer, size: int) -> None:
    with socket.create_connection(("127.0.0.1", hub.address.port), timeout=10) as stranger:
        stranger.sendall(GREETING + b"\x06" + size.to_bytes(8, "big") + bytes(100))
        data = b"?"
        while data:
            with contextlib.suppress(ConnectionResetError):
                data = b""
                data = stranger.recv(4096)  # its greeting, then the end
    assert hub.failure is None


def test_who_proves_nothing_is_cut_off(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub._unauthenticated, "_most", 4)
    strangers = [socket.create_connection(("127.0.0.1", hub.address.port), timeout=10) for _ in range(20)]
    with connected(hub) as link:
        link.send("alive")
        wait_until(link.receive)
        for stranger in strangers[:16]:  # the oldest
            while stranger.recv(4096):
                pass
        link.send("alive")
        assert link.wait(10), "one who has proved it is not"
    for stranger in strangers:
        stranger.close()


def test_errors_as_long_as_they_like_fit_into_a_message(hub: HubServer) -> None:
    with connected(hub) as link:
        link.send("alive", why="x" * (5 << 20))
        wait_until(link.receive)
    assert hub.failure is None
