"""A model of executors and rank processes that follow the elastic protocol, with a real Membership and no clock.

The model checks what must never happen: two ranks with one number, members of two worlds at a time, or a world with a
dead member that never ends.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from spark_hvd.runner.elastic.membership.events import (
    AgentLeaving,
    AgentLost,
    AgentUp,
    Assign,
    Broken,
    Committed,
    Decision,
    Dismiss,
    EndAgent,
    Ended,
    Entered,
    Event,
    Finish,
    Finished,
    Go,
    Joined,
    Limits,
    Loss,
    Note,
    Ready,
    Reset,
    StartWorker,
    StopWorker,
    Update,
    Yielded,
)
from spark_hvd.runner.elastic.membership.state import Membership
from spark_hvd.world.layout import RankInfo


@dataclass
class Process:
    """A rank process of the model."""

    number: int
    agent: int
    place: RankInfo
    state: str = "preparing"  # waiting, meeting, training, broken, finishing, returned, dead
    generation: int | None = None
    hangs: bool = False
    update: bool = False
    commits: int = -1
    step: int = 0
    function: int = 1


@dataclass
class Model:
    """Executors and processes. Messages are delivered at once and in order, unless a test withholds them."""

    limits: Limits
    steps: int = 1000
    now: float = 0.0
    apart: bool = False
    """Whether processes do not reach each other."""
    functions: int = 1
    """How many elastic functions fn has."""
    membership: Membership = field(init=False)
    agents: dict[int, tuple[str, int]] = field(default_factory=dict)
    processes: dict[int, Process] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    generations: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.membership = Membership(self.limits, random.Random(0))

    # ---- what tests do --------------------------------------------------------------------------------------------

    def up(self, agent: int, host: str | None = None, task: int | None = None) -> None:
        task = agent if task is None else task
        self.agents[agent] = (host or f"host{agent}", task)
        self.tell(AgentUp(agent, host or f"host{agent}", task))

    def lose(self, agent: int, why: str = "has not been heard from") -> None:
        """Remove an executor with its process, and tell the driver."""
        self.kill_agent(agent)
        self.tell(AgentLost(agent, why))

    def kill_agent(self, agent: int) -> None:
        """Remove an executor without telling anyone."""
        self.agents.pop(agent, None)
        for process in self.alive():
            if process.agent == agent:
                process.state = "dead"

    def leave(self, agent: int) -> None:
        self.tell(AgentLeaving(agent, "decommissioned"))

    def fail(self, rank: int, *, raised: bool = False, error: str = "was killed by SIGKILL") -> None:
        """End the process of a rank, which its agent reports."""
        self.fail_process(self.of_rank(rank), raised=raised, error=error)

    def fail_process(self, process: Process, *, raised: bool = False, error: str = "was killed by SIGKILL") -> None:
        """End a process that may not have a rank yet, which its agent reports."""
        process.state = "dead"
        self.tell(Ended(process.number, Loss.FAILED, error, raised=raised))

    def hang(self, rank: int) -> None:
        self.of_rank(rank).hangs = True

    def of_rank(self, rank: int) -> Process:
        generation = self.membership.generation
        assert generation is not None
        return self.processes[generation.members[rank]]

    def alive(self) -> list[Process]:
        return [process for process in self.processes.values() if process.state not in ("dead", "returned")]

    @property
    def size(self) -> int:
        """The size of the generation that trains; 0 if none does."""
        generation = self.membership.generation
        return len(generation.members) if generation is not None and generation.trains else 0

    def run(self, seconds: float = 1.0, *, commit: bool = True, tick: float = 0.1) -> None:
        """Let time pass. Every process that can makes a step each ``tick`` seconds."""
        until = self.now + seconds
        while self.now < until:
            self.now += tick
            for process in list(self.processes.values()):
                self.step(process, commit=commit)
            self.act(self.membership.tick(self.now))

    def prepare(self, *numbers: int) -> None:
        """Let only these processes reach their elastic function."""
        for number in numbers:
            self.enter(self.processes[number])

    # ---- how processes behave -------------------------------------------------------------------------------------

    def step(self, process: Process, *, commit: bool = True) -> None:
        if process.hangs or process.state in ("dead", "returned", "waiting", "meeting", "finishing"):
            return
        if process.state in ("preparing", "broken"):
            self.enter(process)
            return
        members = [self.processes[number] for number in self.generations[process.generation or 0]]
        if any(
            peer.state not in ("training", "finishing") or peer.generation != process.generation for peer in members
        ):
            self.break_up(process, "connection closed by peer")
        elif any(peer.hangs for peer in members):
            return  # waits in a collective
        elif process is members[0]:
            self.lockstep(members, commit=commit)

    def lockstep(self, members: list[Process], *, commit: bool) -> None:
        update = members[0].update
        commits = max(0, *(peer.commits for peer in members))
        for peer in members:
            if peer.commits < commits:  # it is given the state
                self.tell(Committed(peer.number, commits))
        for peer in members:
            peer.step += 1
            peer.commits = commits + int(commit)
            self.tell(Committed(peer.number, peer.commits))
        for peer in members:
            if peer.state != "training":  # told meanwhile that it is over
                continue
            if update and commit:
                generation, peer.generation, peer.state = peer.generation, None, "broken"
                assert generation is not None
                self.tell(Yielded(peer.number, generation))
            elif max(peer.step for peer in members) >= self.steps:
                peer.state = "finishing"
                assert peer.generation is not None
                self.tell(Finished(peer.number, peer.generation))

    def enter(self, process: Process) -> None:
        process.state, process.generation, process.update = "waiting", None, False
        self.tell(Entered(process.number))

    def break_up(self, process: Process, error: str) -> None:
        generation, process.generation, process.state = process.generation, None, "broken"
        assert generation is not None
        self.tell(Broken(process.number, generation, error))

    # ---- acting on decisions --------------------------------------------------------------------------------------

    def tell(self, event: Event) -> None:
        self.act(self.membership.handle(event, self.now))

    def act(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            self.act_on(decision)
        self.check()

    def act_on(self, decision: Decision) -> None:
        match decision:
            case Note(text):
                self.notes.append(text)
            case StartWorker(agent, number, place):
                assert number not in self.processes
                assert not [each for each in self.alive() if each.agent == agent], "an agent has one process"
                if agent in self.agents:
                    self.processes[number] = Process(number, agent, place)
                else:  # gone, though the driver does not know
                    self.processes[number] = Process(number, agent, place, "dead")
            case StopWorker(_, number):
                process = self.processes[number]
                if process.agent in self.agents:
                    process.state = "dead"
                    self.tell(Ended(number, Loss.FAILED, "was killed by SIGKILL"))
            case Dismiss(_, number):
                process = self.processes[number]
                if process.state != "dead":
                    assert process.state == "waiting"
                    process.state = "dead"
                    self.tell(Ended(number, Loss.LOST, "left"))
            case Assign(_, number, generation, place):
                members = self.membership.generation.members if self.membership.generation else ()
                self.generations[generation] = members
                process = self.processes[number]
                if process.state == "dead":
                    return
                assert process.state == "waiting"
                process.state, process.generation, process.place = "meeting", generation, place
                if not process.hangs:
                    self.tell(Ready(number, generation, ("127.0.0.1", 1) if place.rank == 0 else None))
            case Go(_, number, generation):
                process = self.processes[number]
                if process.state == "meeting" and process.generation == generation and not process.hangs:
                    process.state = "training"
                    if self.apart:
                        self.break_up(process, "rank 0 of 2 could not meet the other ranks")
                    else:
                        self.tell(Joined(number, generation))
            case Reset(_, number, generation):
                process = self.processes[number]
                if process.generation == generation and process.state != "dead" and not process.hangs:
                    process.state, process.generation = "broken", None
            case Update(_, number, generation):
                if self.processes[number].generation == generation:
                    self.processes[number].update = True
            case Finish(_, number, generation):
                process = self.processes[number]
                if process.state == "finishing":
                    assert process.generation == generation
                    if process.function == self.functions:
                        process.state = "returned"
                        self.tell(Ended(number))
                    else:
                        process.state, process.step, process.function = "broken", 0, process.function + 1
            case EndAgent(agent, again):
                if again:
                    self.agents.pop(agent, None)
                for process in self.alive():
                    if process.agent == agent:
                        process.state = "dead"

    def check(self) -> None:
        """Check what must hold at every moment."""
        training = [process for process in self.processes.values() if process.state in ("meeting", "training")]
        generations = {process.generation for process in training}
        assert len(generations) <= 1, f"two worlds at a time: {generations}"
        ranks = [process.place.rank for process in training]
        assert len(set(ranks)) == len(ranks), f"a rank twice: {ranks}"
        assert all(process.place.size == len(self.generations[process.generation or 0]) for process in training)


TWO = Limits(num_proc=2, min_num_proc=1, max_num_proc=2)


def trained(limits: Limits = TWO, steps: int = 1000, functions: int = 1) -> Model:
    """Return a model whose num_proc ranks train."""
    model = Model(limits, steps, functions=functions)
    for agent in range(limits.num_proc):
        model.up(agent)
    model.run(2.0)
    assert model.size == limits.num_proc
    return model
