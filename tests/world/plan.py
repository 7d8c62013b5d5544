"""What a seed defines: a run, its cluster, and its faults."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random

from spark_hvd.runner.elastic.membership.events import Limits


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong.

    Attributes:
        at: Seconds after the start of the run.
        kind: The kind; see :mod:`tests.world.faults`.
        target: Selects the target.
        seconds: Its duration; None for forever.
    """

    at: float
    kind: str
    target: int = 0
    seconds: float | None = None

    def __str__(self) -> str:
        lasts = "for good" if self.seconds is None else f"for {self.seconds:.1f} s"
        return f"{self.at:5.1f} s: {self.kind} {self.target} {lasts}"


@dataclass(frozen=True)
class Plan:
    """One run.

    Attributes:
        seed: Seed of the remaining chance: delays, choices.
        limits: The run's limits.
        hosts: Slots of each host.
        starts: When each task starts.
        rows, batch_size, epochs: The training.
        again: Elastic functions besides the last; each ends with an epoch.
        commit_every: Steps between commits.
        checks: Whether ranks look for updates at the other steps.
        step_seconds: About how long a step takes.
        preparing: Minimum and maximum seconds until a rank calls its elastic function.
        collective_timeout, timeout: The run's timeouts.
        latency: Maximum seconds that a message takes.
        names: Maximum number of named collectives that get a number.
        sealed: Whether one collective of each step has seals, which make it a different one each time.
        grain: Seconds of which all times are multiples; 0 for none.
        elastic: Whether fn has an elastic function.
        faults: The faults, in order.
    """

    seed: int | str
    limits: Limits
    hosts: tuple[int, ...] = (1, 1, 1)
    starts: tuple[float, ...] = (0.0, 0.0, 0.0)
    rows: int = 24
    batch_size: int = 2
    epochs: int = 2
    again: int = 0
    commit_every: int = 1
    checks: bool = False
    step_seconds: float = 1.0
    preparing: tuple[float, float] = (0.1, 1.0)
    collective_timeout: float = 20.0
    timeout: float = 400.0
    latency: float = 0.02
    names: int = 1024
    sealed: bool = True
    grain: float = 0.0
    elastic: bool = True
    faults: tuple[Fault, ...] = field(default=())

    def without(self, number: int) -> Plan:
        """Return the same plan without one fault."""
        return replace(self, faults=self.faults[:number] + self.faults[number + 1 :])

    def describe(self) -> str:
        """Return a description of the whole plan."""
        faults = "".join(f"\n    {fault}" for fault in self.faults) or "\n    none"
        return f"{replace(self, faults=())}\n  faults:{faults}"


LASTING = {"cut", "cut up", "cut down", "cut ranks", "freeze host", "freeze driver", "slow", "stop", "bad host"}
KINDS = {
    "kill": 6, "raise": 2, "hang": 1, "slow": 2, "stop": 1, "lose task": 3, "lose host": 3, "fork server": 2, "cut": 2,
    "cut up": 1, "cut down": 1, "cut ranks": 2, "freeze host": 2, "freeze driver": 1, "notice": 3, "notice to rank": 1,
    "decommission": 2, "new host": 2, "all raise": 0.3, "driver": 0.3,
    "bad host": 1, "poison": 0.7, "interrupt": 0.4, "clock": 0.7, "returns": 0.4,
}  # fmt: skip


def plan_of(seed: int | str) -> Plan:
    """Return the run that a seed defines."""
    chance = Random(f"plan {seed}")
    most = chance.choice([2, 2, 3, 3, 4])
    wanted = chance.randint(max(1, most - 1), most)
    patience = chance.choice([10.0, 10.0, 10.0, 30.0])  # for late tasks; sometimes longer than for later ranks
    limits = Limits(
        num_proc=wanted,
        min_num_proc=chance.randint(1, wanted),
        max_num_proc=most,
        start_timeout=patience,
        elastic_timeout=chance.choice([15.0, 25.0]),
        reset_limit=chance.choice([None, None, None, 1, 2]),
        rejoin_timeout=8.0,
        host_failure_limit=chance.choice([2, 3]),
        cooldown=chance.choice([None, (2.0, 6.0)]),
    )
    hosts = [chance.choice([1, 1, 2]) for _ in range(most)]
    while sum(hosts) < most + chance.choice([0, 0, 1]):
        hosts.append(1)
    starts = tuple(chance.choice([0.0, 0.5, chance.uniform(0, patience - 1)]) * (task > 0) for task in range(most))
    only_kills = chance.random() < 0.05
    faults: list[Fault] = []
    for _ in range(5 if only_kills else chance.choice([0, 1, 1, 2, 2, 3, 4])):
        together = faults and chance.random() < 0.5
        at = faults[-1].at + chance.uniform(0, 0.6) if together else chance.uniform(0.0, 14.0)
        kind = "kill" if only_kills else chance.choices(list(KINDS), list(KINDS.values()))[0]
        seconds = chance.choice([1.0, 4.0, 9.0, 20.0]) * chance.uniform(0.6, 1.1) if kind in LASTING else None
        if kind.startswith("cut") and chance.random() < 0.2:
            seconds = None
        faults.append(Fault(at, kind, chance.randrange(12), seconds))
    made = Plan(
        seed,
        limits,
        tuple(hosts),
        starts,
        rows=chance.choice([12, 17, 24]),
        batch_size=chance.choice([1, 2, 3]),
        epochs=chance.choice([1, 2, 2]),
        commit_every=chance.choice([1, 1, 2, 3]),
        checks=chance.random() < 0.4,
        step_seconds=chance.choice([0.5, 1.0, 1.0, 2.0]),
        latency=chance.choice([0.005, 0.02, 0.3]),
        names=chance.choice([1024, 1024, 1, 0]),
        sealed=chance.random() < 0.5,
        again=int(chance.random() < 0.1),
        grain=chance.choice([0.0, 0.0, 0.0, 0.25]),
        elastic=chance.random() > 0.03,
        faults=tuple(sorted(faults, key=lambda fault: fault.at)),
    )
    # Without an elastic function, ranks return at any time: a value can be lost before the others arrive.
    return made if made.elastic else replace(made, preparing=(0.1, 12.0))
