"""Who is there: the agents and workers of an elastic run, where new workers may start, and what they are called."""

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
        """A worker of this task, on this host, has taken part in a commit."""
        self._failures.get(host, {}).pop(task, None)

    def excluded(self, host: str, now: float) -> bool:
        """Whether the host gets no new workers now."""
        return self._until.get(host, 0.0) > now

    def for_ever(self, host: str) -> bool:
        """Whether the host never gets new workers again."""
        return self._until.get(host, 0.0) == float("inf")

    def _seconds(self, times: int) -> float:
        if self.cooldown is None:
            return float("inf")
        least, greatest = self.cooldown
        return float(min(greatest, least * 2.0 ** min(times, 32) * (1.0 + self.random.random() / 4)))


_BACKOFF = 0.5
_GREATEST_BACKOFF = 16.0


class Roster:
    """See the module's description. ``agents`` are those alive, ``workers`` are all there have been, by number."""

    def __init__(self, exclusion: Exclusion) -> None:
        self.agents: dict[int, AgentRecord] = {}
        self.workers: dict[int, Worker] = {}
        self._exclusion = exclusion

    def add_agent(self, number: int, host: str, task: int) -> None:
        """Take in an agent."""
        taken = {agent.slot for agent in self.agents.values() if agent.host == host}
        slot = next(slot for slot in range(len(taken) + 1) if slot not in taken)
        self.agents[number] = AgentRecord(number, host, task, slot)

    def add_worker(self, agent: AgentRecord) -> Worker:
        """Note a new worker of an agent."""
        worker = Worker(len(self.workers), agent.number, agent.host, agent.task)
        self.workers[worker.number] = worker
        agent.worker = worker.number
        return worker

    def idle(self, now: float) -> list[AgentRecord]:
        """The agents that may have a new worker; those of a host next to each other."""
        idle = [
            agent
            for agent in self.agents.values()
            if agent.worker is None
            and agent.leaving is None
            and agent.not_before <= now
            and not self._exclusion.excluded(agent.host, now)
        ]
        if not idle:  # as at nearly every tick
            return idle
        first_seen = {agent.host: place for place, agent in reversed(list(enumerate(self.agents.values())))}
        return sorted(idle, key=lambda agent: (first_seen[agent.host], agent.slot))

    def places_of(self, newcomers: Sequence[AgentRecord]) -> Sequence[RankInfo]:
        """What new workers of these agents are told for the time being: as if they joined those that are there."""
        old = [worker.host for worker in sorted(self.alive(), key=lambda worker: worker.seniority)]
        return WorldLayout.of_ranks(old + [agent.host for agent in newcomers]).ranks[len(old) :]

    def count_failure(self, worker: Worker, now: float) -> float | None:
        """A worker has failed.

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
        """A worker has taken part in a commit."""
        self._exclusion.succeeded(worker.host, worker.task)
        if worker.agent in self.agents:
            self.agents[worker.agent].failures = 0

    def unschedulable(self) -> list[AgentRecord]:
        """Agents without a worker that will never have one."""
        staffed = {worker.agent for worker in self.alive()}
        return [a for a in self.agents.values() if self._exclusion.for_ever(a.host) and a.number not in staffed]

    def alive(self) -> list[Worker]:
        """The workers that may still take part."""
        return [worker for worker in self.workers.values() if worker.alive]

    def waiting(self) -> list[Worker]:
        """The workers that ask for a generation, in the order of their seniority."""
        waiting = (worker for worker in self.workers.values() if worker.stage is Stage.WAITING)
        return sorted(waiting, key=lambda worker: worker.seniority)

    def preparing(self) -> set[int]:
        """The agents whose workers prepare."""
        return {worker.agent for worker in self.workers.values() if worker.stage is Stage.PREPARING}

    def missing(self, generation: GenerationRecord) -> list[int]:
        """The members of a generation that are neither gone nor back."""
        members = map(self.workers.__getitem__, generation.members)
        return [worker.number for worker in members if worker.stage in (Stage.MEMBER, Stage.FINISHED)]

    def late(self, generation: GenerationRecord) -> tuple[list[int], str]:
        """The members of a generation for which the others wait, and what they have yet to do."""
        if generation.over is not None:
            return self.missing(generation), "come back"
        done = generation.joined if len(generation.ready) == len(generation.members) else generation.ready
        return [number for number in generation.members if number not in done], "join the others"

    def to_change(self, generation: GenerationRecord, most: int) -> bool:
        """Whether others are to take part in the next generation: members of this one go, or workers wait."""
        members = [self.workers[number] for number in generation.members]
        if any(worker.stage is not Stage.MEMBER for worker in members):
            return False
        behind = self.behind(generation)
        waiting = any(not self.leaves(worker) and worker not in behind for worker in self.waiting())
        stay = sum(not self.leaves(worker) for worker in members)
        grows, shrinks = waiting and stay < most, stay < len(members) and (stay > 0 or waiting)
        return grows or shrinks

    def behind(self, generation: GenerationRecord) -> list[Worker]:
        """New workers that wait in fn's first elastic function, where members of a generation are in a later one."""
        members = map(self.workers.__getitem__, generation.members)
        if not any(worker.alive and worker.functions for worker in members):
            return []
        return [worker for worker in self.waiting() if worker.rank is None]

    def fellows(self, workers: list[Worker], last: GenerationRecord | None, least: int) -> list[Worker]:
        """Those that can train together after the last generation; all if these are fewer than `least`."""
        behind = [] if last is None else self.behind(last)
        fellows = [worker for worker in workers if worker not in behind]
        return fellows if len(fellows) >= least else workers  # the sync of their states then says what is wrong

    def leaves(self, worker: Worker) -> bool:
        """Whether a worker's executor is to go."""
        return worker.agent in self.agents and self.agents[worker.agent].leaving is not None

    def addresses(self, workers: Iterable[int]) -> list[tuple[int, int]]:
        """(agent, worker) of those workers that are alive."""
        return [(self.workers[number].agent, number) for number in workers if self.workers[number].alive]

    def name(self, worker: Worker) -> str:
        """What messages call a worker."""
        place = f"a new rank (number {worker.number})" if worker.rank is None else f"rank {worker.rank}"
        return f"{place} on host {worker.host}"

    def name_of_agent(self, agent: AgentRecord) -> str:
        """What messages call an agent."""
        return f"task {agent.task} on {agent.host}" if agent.worker is None else self.name(self.workers[agent.worker])
