"""The agents and workers of an elastic run, where new workers may start, and how messages name them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from spark_hvd.runner.elastic.membership.records import AgentRecord, GenerationRecord, Stage, Worker
from spark_hvd.world.layout import RankInfo, WorldLayout


@dataclass(slots=True)
class Exclusion:
    """Counts failures by task and host.

    A task's failures count until one of its workers takes part in a commit, because a host where training continues is
    a good one. After ``limit`` failures, a host is excluded. ``cooldown`` is the minimum and the maximum number of
    seconds that this lasts; None means forever. Each exclusion of a host is twice as long as the one before, plus a
    random part of up to a quarter, so that hosts do not all return at once.
    """

    limit: int
    cooldown: tuple[float, float] | None = None
    random: random.Random = field(default_factory=random.Random)
    _failures: dict[str, dict[int, int]] = field(default_factory=dict)
    _until: dict[str, float] = field(default_factory=dict)
    _times: dict[str, int] = field(default_factory=dict)

    def failed(self, host: str, task: int, now: float) -> float | None:
        """Count a failure.

        Returns:
            Seconds for which the host is excluded now (infinite for forever); None if it is not.
        """
        counts = self._failures.setdefault(host, {})
        counts[task] = counts.get(task, 0) + 1
        if sum(counts.values()) < self.limit:
            return None
        del self._failures[host]
        seconds = self._seconds(self._times.get(host, 0))
        self._times[host] = self._times.get(host, 0) + 1
        self._until[host] = now + seconds
        return seconds

    def succeeded(self, host: str, task: int) -> None:
        """Note that a worker of this task, on this host, has taken part in a commit."""
        self._failures.get(host, {}).pop(task, None)

    def excluded(self, host: str, now: float) -> bool:
        """Tell whether the host gets no new workers now."""
        return self._until.get(host, 0.0) > now

    def for_ever(self, host: str) -> bool:
        """Tell whether the host never gets new workers again."""
        return self._until.get(host, 0.0) == float("inf")

    def _seconds(self, times: int) -> float:
        if self.cooldown is None:
            return float("inf")
        least, greatest = self.cooldown
        return float(min(greatest, least * 2.0 ** min(times, 32) * (1.0 + self.random.random() / 4)))


_BACKOFF = 0.5
_GREATEST_BACKOFF = 16.0


class Roster:
    """See the module's description. By number, ``agents`` has the living ones, ``workers`` all that ever existed."""

    def __init__(self, exclusion: Exclusion) -> None:
        self.agents: dict[int, AgentRecord] = {}
        self.workers: dict[int, Worker] = {}
        self._exclusion = exclusion

    def add_agent(self, number: int, host: str, task: int) -> None:
        """Add an agent, with the lowest slot that is free on its host."""
        taken = {agent.slot for agent in self.agents.values() if agent.host == host}
        slot = next(slot for slot in range(len(taken) + 1) if slot not in taken)
        self.agents[number] = AgentRecord(number, host, task, slot)

    def add_worker(self, agent: AgentRecord) -> Worker:
        """Add a worker to an agent."""
        worker = Worker(len(self.workers), agent.number, agent.host, agent.task)
        self.workers[worker.number] = worker
        agent.worker = worker.number
        return worker

    def idle(self, now: float) -> list[AgentRecord]:
        """Return the agents that may have a new worker, grouped by host."""
        idle = [
            agent
            for agent in self.agents.values()
            if agent.worker is None
            and agent.leaving is None
            and agent.not_before <= now
            and not self._exclusion.excluded(agent.host, now)
        ]
        if not idle:  # true for nearly every tick
            return idle
        first_seen = {agent.host: place for place, agent in reversed(list(enumerate(self.agents.values())))}
        return sorted(idle, key=lambda agent: (first_seen[agent.host], agent.slot))

    def places_of(self, newcomers: Sequence[AgentRecord]) -> Sequence[RankInfo]:
        """Return provisional places for new workers of these agents, as if they joined the living ones."""
        old = [worker.host for worker in sorted(self.alive(), key=lambda worker: worker.seniority)]
        return WorldLayout.of_ranks(old + [agent.host for agent in newcomers]).ranks[len(old) :]

    def count_failure(self, worker: Worker, now: float) -> float | None:
        """Count the failure of a worker.

        Returns:
            Seconds for which its host is excluded now; None if it is not.
        """
        agent = self.agents.get(worker.agent)
        if agent is not None:
            agent.failures += 1
            if agent.failures > 1:
                agent.not_before = now + min(_BACKOFF * 2.0 ** (agent.failures - 2), _GREATEST_BACKOFF)
        return self._exclusion.failed(worker.host, worker.task, now)

    def count_commit(self, worker: Worker) -> None:
        """Note that a worker has taken part in a commit."""
        self._exclusion.succeeded(worker.host, worker.task)
        if worker.agent in self.agents:
            self.agents[worker.agent].failures = 0

    def unschedulable(self) -> list[AgentRecord]:
        """Return the agents that have no worker, nor its value, and will never get one."""
        staffed = {worker.agent for worker in self.workers.values() if worker.stage is not Stage.GONE}
        return [a for a in self.agents.values() if self._exclusion.for_ever(a.host) and a.number not in staffed]

    def alive(self) -> list[Worker]:
        """Return the workers that may still take part."""
        return [worker for worker in self.workers.values() if worker.alive]

    def returned(self) -> list[int]:
        """Return the numbers of the workers whose fn has returned, in order."""
        return [worker.number for worker in self.workers.values() if worker.stage is Stage.RETURNED]

    def waiting(self) -> list[Worker]:
        """Return the workers that ask for a generation, in order of seniority."""
        waiting = (worker for worker in self.workers.values() if worker.stage is Stage.WAITING)
        return sorted(waiting, key=lambda worker: worker.seniority)

    def preparing(self) -> set[int]:
        """Return the agents whose workers are preparing."""
        return {worker.agent for worker in self.workers.values() if worker.stage is Stage.PREPARING}

    def missing(self, generation: GenerationRecord) -> list[int]:
        """Return the members of a generation that are neither gone nor back."""
        members = map(self.workers.__getitem__, generation.members)
        return [worker.number for worker in members if worker.stage in (Stage.MEMBER, Stage.FINISHED)]

    def late(self, generation: GenerationRecord) -> tuple[list[int], str]:
        """Return the members for which the others of a generation wait, and what they have yet to do."""
        if generation.over is not None:
            return self.missing(generation), "come back"
        done = generation.joined if len(generation.ready) == len(generation.members) else generation.ready
        return [number for number in generation.members if number not in done], "join the others"

    def to_change(self, generation: GenerationRecord, most: int) -> bool:
        """Tell whether the next generation should differ: members of this one leave, or workers wait."""
        members = [self.workers[number] for number in generation.members]
        if any(worker.stage is not Stage.MEMBER for worker in members):
            return False
        behind = self.behind(generation)
        waiting = any(not self.leaves(worker) and worker not in behind for worker in self.waiting())
        stay = sum(not self.leaves(worker) for worker in members)
        grows, shrinks = waiting and stay < most, stay < len(members) and (stay > 0 or waiting)
        return grows or shrinks

    def behind(self, generation: GenerationRecord) -> list[Worker]:
        """Return new workers that wait in fn's first elastic function while the members are in a later one."""
        members = map(self.workers.__getitem__, generation.members)
        if not any(worker.alive and worker.functions for worker in members):
            return []
        return [worker for worker in self.waiting() if worker.rank is None]

    def fellows(self, workers: list[Worker], last: GenerationRecord | None, least: int) -> list[Worker]:
        """Return the workers that can train together after the last generation; all if fewer than `least` can."""
        behind = [] if last is None else self.behind(last)
        fellows = [worker for worker in workers if worker not in behind]
        return fellows if len(fellows) >= least else workers  # syncing their states then reports the problem

    def leaves(self, worker: Worker) -> bool:
        """Tell whether a worker's executor will leave."""
        return worker.agent in self.agents and self.agents[worker.agent].leaving is not None

    def addresses(self, workers: Iterable[int]) -> list[tuple[int, int]]:
        """Return the (agent, worker) pairs of the workers that are alive."""
        return [(self.workers[number].agent, number) for number in workers if self.workers[number].alive]

    def name(self, worker: Worker) -> str:
        """Name a worker in messages."""
        place = f"a new rank (number {worker.number})" if worker.rank is None else f"rank {worker.rank}"
        return f"{place} on host {worker.host}"

    def name_of_agent(self, agent: AgentRecord) -> str:
        """Name an agent in messages."""
        return f"task {agent.task} on {agent.host}" if agent.worker is None else self.name(self.workers[agent.worker])
