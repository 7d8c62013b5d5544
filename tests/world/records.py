"""What the reference of membership remembers: see :mod:`tests.world.members`."""

from __future__ import annotations

from dataclasses import dataclass, field

from spark_hvd.runner.elastic.membership import events as ev


@dataclass
class Agent:
    """One attempt of a task."""

    number: int
    host: str
    task: int
    slot: int
    worker: int | None = None
    leaving: bool = False
    failures: int = 0
    pause_until: float = 0.0


@dataclass
class Worker:
    """One process of a rank; `state` is preparing, waiting, member, finished, returned or gone."""

    number: int
    agent: int
    host: str
    task: int
    state: str = "preparing"
    rank: int | None = None
    commits: int = -1
    failed: bool = False
    raised: bool = False
    later: bool = False


@dataclass
class World:
    """A generation."""

    number: int
    members: list[int]
    commits: int
    deadline: float | None
    store: tuple[str, int] | None = None
    ready: set[int] = field(default_factory=set)
    joined: set[int] = field(default_factory=set)
    over: bool = False
    failed: bool = False
    blamed: set[str] = field(default_factory=set)
    culprit: int | None = None
    updating: bool = False
    finished: bool = False


class Kept:
    """Agents, workers, and the current world, or the last.

    Args:
        limits: The run's limits.

    Attributes:
        verdict: How the run ended, with the required words of the text.
    """

    def __init__(self, limits: ev.Limits) -> None:
        self.limits = limits
        self.agents: dict[int, Agent] = {}
        self.workers: list[Worker] = []
        self.world: World | None = None
        self.verdict: tuple[ev.End, str, int | None, tuple[int, ...]] | None = None

    def _members(self) -> list[Worker]:
        return [] if self.world is None else [self.workers[number] for number in self.world.members]

    def _addresses(self) -> list[tuple[int, int]]:
        return [(member.agent, member.number) for member in self._members() if self._alive(member)]

    def _its_world(self, event: ev._InGeneration) -> World | None:
        """Return the current world, if it continues and the event comes from one of its members."""
        world, worker = self.world, self.workers[event.worker]
        if world is None or self.verdict is not None or world.over or world.finished or not self._alive(worker):
            return None
        return world if world.number == event.generation and worker.number in world.members else None

    def _alive(self, worker: Worker) -> bool:
        return worker.state not in ("returned", "gone")

    def _leaves(self, worker: Worker) -> bool:
        return worker.agent in self.agents and self.agents[worker.agent].leaving

    def _in_later_function(self, worker: Worker) -> bool:
        return self._alive(worker) and worker.later

    def _is_behind(self, worker: Worker) -> bool:
        """Return whether a worker has not been in a world yet, so that it begins with the first elastic function."""
        return not worker.later and worker.rank is None

    def _by_seniority(self, workers: list[Worker]) -> list[Worker]:
        """Return workers with the state, then others; each in rank order, then in order of arrival."""
        old = sorted((worker for worker in workers if worker.rank is not None), key=lambda worker: worker.rank or 0)
        ordered = [*old, *(worker for worker in workers if worker.rank is None)]
        return sorted(ordered, key=lambda worker: worker.commits < 0)

    def _name(self, worker: Worker) -> str:
        place = f"a new rank (number {worker.number})" if worker.rank is None else f"rank {worker.rank}"
        return f"{place} on host {worker.host}"
