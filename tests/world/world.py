"""A whole elastic run in one process: driver, agents, ranks and the wires between them, under a virtual clock."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from spark_hvd.context import global_state as global_state_module
from spark_hvd.context import init as context
from spark_hvd.context import leave
from spark_hvd.context.global_state import Context
from spark_hvd.data import loader as _loader  # noqa: F401  imported before anything is replaced
from spark_hvd.elastic import kv, run, sync
from spark_hvd.engine import service
from spark_hvd.runner.channel import hub as hub_module
from spark_hvd.runner.elastic import agent as agent_module
from spark_hvd.runner.elastic import hub as elastic_hub
from spark_hvd.runner.elastic import run as elastic_run
from spark_hvd.runner.launch import attend
from spark_hvd.runner.rank import elastic as rank_module
from spark_hvd.transport import registry as registry_module
from spark_hvd.world import launcher
from spark_hvd.world.config import Config
from tests.world import ranks, store
from tests.world.checks import Checks
from tests.world.clock import Clock, me, strand
from tests.world.driver import Driver
from tests.world.faults import strike
from tests.world.mesh import Mesh
from tests.world.named import Named
from tests.world.plan import Plan
from tests.world.ranks import Exit, RankProcess
from tests.world.store import StoreServer
from tests.world.tasks import Host, SimulatedPoller, SimulatedRank, Spark
from tests.world.wire import Network

SECONDS = 500.0
"""Seconds in which a world must have ended."""


class SimulatedWorld:
    """One run of a plan.

    Args:
        plan: The plan.
        tracing: Whether to keep a trace.
    """

    def __init__(self, plan: Plan, *, tracing: bool = False) -> None:
        self.plan = plan
        self.trace: list[str] = []
        self.noted: list[str] = []
        """What the driver has logged about the run."""
        self._tracing = tracing
        self.clock = Clock(f"world {plan.seed}", plan.grain)
        self._started = self.clock.now
        self.network = Network(self.clock, plan.latency)
        self._pids = itertools.count(100)
        self.hosts: dict[str, Host] = {}
        self.jumped = 0.0
        """Seconds by which the time of day has jumped."""
        self.poison: set[int] = set()
        """Rows that kill the rank which trains on them."""
        for slots in plan.hosts:
            name = f"10.0.0.{len(self.hosts) + 1}"
            self.hosts[name] = Host(name, slots)
        self.processes: list[RankProcess] = []
        self.by_pid: dict[int, RankProcess] = {}
        self.stores: dict[tuple[str, int], StoreServer] = {}
        self.checks = Checks(self)
        self.driver = Driver(self)
        self.spark = Spark(self)

    @property
    def seconds(self) -> float:
        """Seconds since its start."""
        return self.clock.now - self._started

    def next_pid(self) -> int:
        """Return a unique number."""
        return next(self._pids)

    def log(self, form: str, *args: object) -> None:
        """Record an event, if there is a trace."""
        if self._tracing:
            self.trace.append(f"{self.seconds:7.2f} {form.format(*args)}")

    def add_host(self) -> None:
        """Add an executor to Spark."""
        name = f"10.0.0.{len(self.hosts) + 1}"
        self.hosts[name] = Host(name, 1)
        self.spark.place()

    def lost(self, host: Host) -> None:
        """Let Spark notice that an executor is gone."""
        host.lost = True
        for attempt in self.spark.attempts_made:
            if attempt.host is host:
                self.spark.lose(attempt)

    def run(self) -> None:
        """Carry out the plan; raise an AssertionError if something is wrong."""
        global _world
        _world = self
        try:
            self.driver.start()
            self.spark.start()
            for fault in self.plan.faults:
                self.clock.after(fault.at, strike, self, fault)
            self.clock.run(self._started + SECONDS, self._over)
            if self.driver.ended_at is not None:
                self.clock.run(self.clock.now + 45.0, self._empty)
            self.checks.at_end()
        finally:
            self.clock.close()
            _world = None

    def _over(self) -> bool:
        return self.driver.ended_at is not None

    def _empty(self) -> bool:
        return not any(process.alive for process in self.processes) and not any(
            attempt.alive for attempt in self.spark.attempts_made
        )


_world: SimulatedWorld | None = None


class _GlobalState:
    """Replaces the GlobalState of the process whose code runs."""

    def __getattr__(self, name: str) -> Any:
        return getattr(me().global_state, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(me().global_state, name, value)


class _Condition:
    """Replaces threading.Condition, in blocking code."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def wait_for(self, ready: Any) -> None:
        strand().wait(ready)

    def notify_all(self) -> None:
        me().strand.poke()


def _now() -> float:
    assert _world is not None
    return _world.clock.now


def _time_of_day() -> float:
    assert _world is not None
    return _world.clock.now + _world.jumped


def _sleep(seconds: float) -> None:
    strand().wait(lambda: False, seconds)


def _enter(world: Any, layout: Any, store_: Any, timeout: float, backend: Any, config: Any) -> None:
    """Replaces the creation of torch's process group: ranks connect to each other."""
    process: RankProcess = me()
    rank, generation = world.me.rank, world.generation
    store_.set(f"pid/{rank}", str(process.pid))
    pids = [int(text) for text in store_.multi_get([f"pid/{other}" for other in range(world.me.size)])]
    members = [process.world.by_pid[pid] for pid in pids]
    mesh = Mesh(process, generation, rank, members, process.spec.collective_timeout)
    registry = process.global_state.registry
    assert registry is not None
    registry.add(mesh)
    try:
        mesh.exchange("connect", rank)
        named = mesh.named = Named(mesh, [info.host for info in layout.ranks])
        registry.on_abort(named.abort)
        for sender, message in process.told.pop(generation, []):
            named.take_message(sender, message)
        named.open()
    except BaseException as error:
        registry.abort(str(error))
        raise
    process.joined += 1
    process.say({"type": "output", "stream": "out", "text": f"{process.spec.stream} {generation} {rank}"})
    vitals = {"rank": rank, "size": world.me.size, "generation": generation, "clock": _now()}
    process.say({"type": "vitals", "vitals": vitals})
    process.world.checks.joined(process, generation, rank, mesh.members)
    queue: Any = SimpleNamespace(members=SimpleNamespace(nccl=None))
    engine: Any = SimpleNamespace(config=config, close=named.close)
    groups: Any = None
    process.global_state.context = Context(world, layout, mesh, store_, True, engine, queue, groups, registry=registry)


def _end_process(code: int) -> None:
    raise Exit(code)


def _allgather_object(mine: Any) -> list[Any]:
    return me().mesh.exchange("allgather_object", mine)


def _broadcast_object(mine: Any, root: int) -> Any:
    mesh = me().mesh
    return mesh.exchange("broadcast_object", mine if mesh.rank == root else None)[root]


@contextlib.contextmanager
def simulated() -> Iterator[None]:
    """Replace clock, wires and processes of this machine by simulated ones."""
    ranks.CONFIG = Config()
    time = SimpleNamespace(monotonic=_now, time=_time_of_day, sleep=_sleep)
    hub_time = SimpleNamespace(monotonic=_now, sleep=lambda seconds: _sleep(max(seconds, 0.25)))
    global_state = _GlobalState()
    nothing = SimpleNamespace(
        Thread=lambda **_: SimpleNamespace(start=lambda: None), Lock=_Condition, Condition=_Condition
    )
    logged = SimpleNamespace(warning=_note_of_run)
    quiet = SimpleNamespace(warning=_note, debug=lambda *_, **__: None, exception=_note)
    network = SimpleNamespace(create_connection=store.Connection)
    resolver = SimpleNamespace(getaddrinfo=lambda host, port, type: [(0, 0, 0, "", (host, port))], SOCK_STREAM=1)
    replaced = [
        (hub_module, dict(time=hub_time, _log=quiet)),
        (elastic_hub, dict(time=time)),
        (elastic_run, dict(time=time, _log=logged)),
        (attend, dict(_LOOK_EVERY=1.0)),
        (agent_module, dict(time=time, SupervisedRank=SimulatedRank, _is_stopped=_is_stopped)),
        (agent_module, dict(zmq=SimpleNamespace(Poller=SimulatedPoller, POLLIN=1))),
        (
            rank_module,
            dict(threading=nothing, global_state=global_state, listen=store.listen, TCPStore=store.SimulatedStore),
        ),
        (rank_module, dict(settle=lambda *_: None, send_frame=_send_frame, end_process=_end_process)),
        (
            rank_module,
            dict(os=SimpleNamespace(getpid=lambda: 1, pipe2=lambda _: (0, 0), environ={}, O_NONBLOCK=0, O_CLOEXEC=0)),
        ),
        (kv, dict(global_state=global_state, time=time, socket=network, TCPStore=store.SimulatedStore)),
        (registry_module, dict(socket=resolver, threading=nothing, time=time, sockets=set, since=lambda _: set())),
        (service, dict(time=time, _log=quiet)),
        (registry_module, dict(cut_to=lambda _: None, cut_among=lambda _: None, answer=lambda *_: None)),
        (global_state_module, dict(global_state=global_state, set_abort_check=lambda _: None)),
        (leave, dict(global_state=global_state, drain=lambda _: None)),
        (context, dict(global_state=global_state, PrefixStore=store.PrefixStore, _enter=_enter, read_config=Config)),
        (run, dict(time=time, gc=SimpleNamespace(collect=lambda: None), _hooks=[])),
        (sync, dict(allgather_object=_allgather_object, broadcast_object=_broadcast_object)),
        (launcher, dict(installed=lambda: me().launcher)),
    ]
    with pytest.MonkeyPatch.context() as patch:
        for module, names in replaced:
            for name, stand_in in names.items():
                assert hasattr(module, name), (module, name)
                patch.setattr(module, name, stand_in)
        yield


def _note(text: str, *args: Any, **_: Any) -> None:
    if _world is not None:
        _world.log("driver: {}", text % args if args else text)


def _note_of_run(form: str, text: str) -> None:
    _note(form, text)
    if _world is not None:
        _world.noted.append(text)


def _is_stopped(pid: int) -> bool:
    assert _world is not None
    process = _world.by_pid[pid]
    return process.strand.frozen and not _world.hosts[process.host].frozen


def _send_frame(process: RankProcess, message: dict[str, Any], payload: bytes = b"") -> None:
    flat = all(isinstance(value, str | int | float | None) for value in message.values())
    process.say(dict(message) if flat else json.loads(json.dumps(message)), payload)
