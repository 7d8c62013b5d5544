"""How faults happen in a world."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from tests.world.ranks import RankProcess, UserError
from tests.world.tasks import Attempt, Host
from tests.world.wire import DRIVER

if TYPE_CHECKING:
    from tests.world.plan import Fault
    from tests.world.world import SimulatedWorld

T = TypeVar("T")


def strike(world: SimulatedWorld, fault: Fault) -> None:
    """Let it happen now; nothing happens if it has no possible target."""
    world.log("*** {}", fault)
    _STRIKES[fault.kind](world, fault)


def _one(candidates: Sequence[T], fault: Fault) -> T | None:
    return candidates[fault.target % len(candidates)] if candidates else None


def _attempt(world: SimulatedWorld, fault: Fault) -> Attempt | None:
    return _one([each for each in world.spark.attempts_made if each.alive], fault)


def _rank(world: SimulatedWorld, fault: Fault) -> RankProcess | None:
    return _one([each for each in world.processes if each.alive], fault)


def _host(world: SimulatedWorld, fault: Fault) -> Host | None:
    return _one([each for each in world.hosts.values() if each.name not in world.network.down], fault)


def _later(world: SimulatedWorld, fault: Fault, call: Callable[[], object]) -> None:
    if fault.seconds is not None:
        world.clock.after(fault.seconds, call)


def _kill(world: SimulatedWorld, fault: Fault) -> None:
    if (process := _rank(world, fault)) is not None:
        process.die(-9)


def _raise(world: SimulatedWorld, fault: Fault) -> None:
    if (process := _rank(world, fault)) is not None:
        process.error = UserError("the loss is nan")


def _all_raise(world: SimulatedWorld, fault: Fault) -> None:
    for process in world.processes:
        process.error = UserError("the loss is nan")


def _bad_host(world: SimulatedWorld, fault: Fault) -> None:
    if (host := _host(world, fault)) is None:
        return
    host.bad = True
    for process in world.processes:
        if process.host == host.name:
            process.die(-9)
    _later(world, fault, lambda: setattr(host, "bad", False))


def _poison(world: SimulatedWorld, fault: Fault) -> None:
    world.poison = set(range(fault.target, fault.target + 1 + fault.target % 3))


def _returns(world: SimulatedWorld, fault: Fault) -> None:
    if (process := _rank(world, fault)) is not None:
        process.returns = True


def _hang(world: SimulatedWorld, fault: Fault) -> None:
    if (process := _rank(world, fault)) is not None:
        process.hangs = True


def _slow(world: SimulatedWorld, fault: Fault) -> None:
    if (process := _rank(world, fault)) is not None:
        process.slow = 4.0
        _later(world, fault, lambda: setattr(process, "slow", 0.0))


def _stop(world: SimulatedWorld, fault: Fault) -> None:
    if (process := _rank(world, fault)) is not None:
        process.freeze(frozen=True)
        _later(world, fault, lambda: process.freeze(frozen=False))


def _lose_task(world: SimulatedWorld, fault: Fault) -> None:
    if (attempt := _attempt(world, fault)) is not None:
        attempt.kill()
        world.clock.after(world.clock.some(0.1, 6.0), world.spark.lose, attempt)


def _lose_host(world: SimulatedWorld, fault: Fault) -> None:
    host = _host(world, fault)
    if host is None:
        return
    world.network.down.add(host.name)
    for attempt in world.spark.attempts_made:
        if attempt.host is host:
            attempt.kill()
    world.clock.after(world.clock.some(0.5, 20.0), world.lost, host)
    if fault.target % 2:
        world.clock.after(world.clock.some(1.0, 15.0), world.add_host)


def _fork_server(world: SimulatedWorld, fault: Fault) -> None:
    if (host := _host(world, fault)) is not None:
        host.server.kill()


def _cut(world: SimulatedWorld, fault: Fault) -> None:
    if (host := _host(world, fault)) is None:
        return
    ways = [(host.name, DRIVER), (DRIVER, host.name)]
    if fault.kind == "cut up":
        ways = ways[:1]
    elif fault.kind == "cut down":
        ways = ways[1:]
    elif fault.kind == "cut ranks":
        others = [name for name in world.hosts if name != host.name]
        other = _one(others, fault)
        ways = [] if other is None else [(host.name, other), (other, host.name)][: 1 + fault.target % 2]
    for way in ways:
        world.network.cut(*way)
        _later(world, fault, lambda way=way: world.network.heal(*way))  # type: ignore[misc]
    world.spark.cut_off(host)


def _freeze_host(world: SimulatedWorld, fault: Fault) -> None:
    if (host := _host(world, fault)) is None:
        return

    def set_frozen(frozen: bool) -> None:
        host.frozen = frozen
        for process in world.processes:
            if process.host == host.name:
                process.freeze(frozen=frozen)

    set_frozen(True)
    _later(world, fault, lambda: set_frozen(False))


def _freeze_driver(world: SimulatedWorld, fault: Fault) -> None:
    world.driver.freeze(frozen=True)
    _later(world, fault, lambda: world.driver.freeze(frozen=False))


def _notice(world: SimulatedWorld, fault: Fault) -> None:
    if (attempt := _attempt(world, fault)) is not None:
        attempt.agent.notice(signal.SIGTERM)
        _goes(world, attempt.host)


def _notice_to_rank(world: SimulatedWorld, fault: Fault) -> None:
    if (process := _rank(world, fault)) is not None:
        process.say({"type": "leaving", "why": "SIGTERM to the rank"})


def _decommission(world: SimulatedWorld, fault: Fault) -> None:
    if (host := _host(world, fault)) is not None:
        host.leaving = True
        _goes(world, host)
        if fault.target % 3:
            world.clock.after(world.clock.some(1.0, 15.0), world.add_host)


def _goes(world: SimulatedWorld, host: Host) -> None:
    host.leaving = True


def _new_host(world: SimulatedWorld, fault: Fault) -> None:
    world.add_host()


def _clock(world: SimulatedWorld, fault: Fault) -> None:
    world.jumped += 3600.0 * (-1) ** fault.target


def _interrupt(world: SimulatedWorld, fault: Fault) -> None:
    world.driver.interrupted = True
    world.driver.poke()


def _driver(world: SimulatedWorld, fault: Fault) -> None:
    world.driver.kill()


_STRIKES: dict[str, Callable[[SimulatedWorld, Fault], None]] = {
    "kill": _kill,
    "raise": _raise,
    "all raise": _all_raise,
    "bad host": _bad_host,
    "poison": _poison,
    "returns": _returns,
    "interrupt": _interrupt,
    "clock": _clock,
    "hang": _hang,
    "slow": _slow,
    "stop": _stop,
    "lose task": _lose_task,
    "lose host": _lose_host,
    "fork server": _fork_server,
    "cut": _cut,
    "cut up": _cut,
    "cut down": _cut,
    "cut ranks": _cut,
    "freeze host": _freeze_host,
    "freeze driver": _freeze_driver,
    "notice": _notice,
    "notice to rank": _notice_to_rank,
    "decommission": _decommission,
    "new host": _new_host,
    "driver": _driver,
}
