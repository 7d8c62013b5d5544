"""Elastic membership as a pure state machine: events and clock ticks in, decisions out.

    agents come  ->  workers are started, prepare, and ask for a generation  ->  a generation meets, and trains
    a member is lost, or its collectives fail   ->  the generation is over: all others are told, and ask for the next
    ranks wait, or a member has to leave        ->  the members are told, and ask for the next at their next commit
    the function has returned on all members    ->  they leave; once fn has returned as well, the run is done

No generation is formed before every member of the last one has asked for it or has gone, so no two worlds ever overlap,
and who does not come back in time is ended. Survivors keep their order, and come before new workers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

from spark_hvd.layout import WorldLayout
from spark_hvd.runner.exclusion import Exclusion
from spark_hvd.runner.membership_events import (
    AgentLeaving,
    AgentLost,
    AgentUp,
    Assign,
    Broken,
    Committed,
    Decision,
    Dismiss,
    End,
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
    Verdict,
    Yielded,
)
from spark_hvd.runner.membership_records import Agent, Generation, Stage, Worker

SETTLE = 1.0
"""Seconds that tasks which Spark starts together get to come, when there are enough already for a start."""
_BACKOFF = 0.5
_GREATEST_BACKOFF = 16.0


class Membership:
    """See the module's description.

    Args:
        limits: The rules.
        chance: Where the length of exclusions gets its chance from.

    Attributes:
        agents: Those alive, by number.
        workers: All there have been, by number.
        generation: The present one, or the last; None before the first.
        resets: Generations that have failed.
        verdict: How the run has ended; None while it goes on.
    """

    def __init__(self, limits: Limits, chance: random.Random | None = None) -> None:
        self.limits = limits
        self.agents: dict[int, Agent] = {}
        self.workers: dict[int, Worker] = {}
        self.generation: Generation | None = None
        self.resets = 0
        self.verdict: Verdict | None = None
        self._exclusion = Exclusion(limits.host_failure_limit, limits.cooldown, chance or random.Random())
        self._out: list[Decision] = []
        self._since: float | None = None  # when time began
        self._enough_since: float | None = None  # agents for a start
        self._short_since: float | None = None  # of workers for a generation
        self._begun = False
        self._commits = -1
        self._fruitless = 0
        self._last_error: tuple[int, str] | None = None  # worker, what happened

    def handle(self, event: Event, now: float) -> list[Decision]:
        """Take one event. Those of workers and generations that are history change nothing."""
        handlers: dict[type, Callable[[Any, float], None]] = {
            AgentUp: self._agent_up,
            AgentLost: self._agent_lost,
            AgentLeaving: self._agent_leaving,
            Entered: self._entered,
            Ready: self._ready,
            Joined: self._joined,
            Broken: self._broken,
            Yielded: self._yielded,
            Committed: self._committed,
            Finished: self._finished,
            Ended: self._ended,
        }
        handlers[type(event)](event, now)
        if isinstance(event, Committed):  # there are many, and nothing follows from one
            return []
        return self.tick(now)

    def tick(self, now: float) -> list[Decision]:
        """Take note of the time; to be called several times a second."""
        if self._since is None:
            self._since = now
        if self.verdict is None:
            self._watch_deadline(now)
            self._staff(now)
            self._form(now)
            self._want_update()
        out, self._out = self._out, []
        return out

    def stop(self, text: str) -> list[Decision]:
        """End the run because the caller wants it."""
        if self.verdict is None:
            self._end(End.STOPPED, text)
        out, self._out = self._out, []
        return out

    @property
    def waits_for_the_silent(self) -> bool:
        """Whether a generation is over but for members that have not said a word: they may be gone."""
        generation = self.generation
        return self.verdict is None and generation is not None and generation.over is not None and self._missing() != []

    def rank_of(self, agent: int) -> int | None:
        """The rank of an agent's worker in the present or last generation."""
        number = self.agents[agent].worker if agent in self.agents else None
        return None if number is None else self.workers[number].rank

    # ---- agents ---------------------------------------------------------------------------------------------------

    def _agent_up(self, event: AgentUp, now: float) -> None:
        if self.verdict is not None:
            self._out.append(EndAgent(event.agent))
            return
        for agent in [agent for agent in self.agents.values() if agent.task == event.task]:
            self._drop_agent(agent, "Spark has started its task anew", now)
        taken = {agent.slot for agent in self.agents.values() if agent.host == event.host}
        slot = next(slot for slot in range(len(taken) + 1) if slot not in taken)
        self.agents[event.agent] = Agent(event.agent, event.host, event.task, slot)

    def _agent_lost(self, event: AgentLost, now: float) -> None:
        if event.agent in self.agents:
            self._drop_agent(self.agents[event.agent], event.why, now)

    def _drop_agent(self, agent: Agent, why: str, now: float) -> None:
        del self.agents[agent.number]
        worker = None if agent.worker is None else self.workers[agent.worker]
        if worker is None or self.verdict is not None:
            return
        if worker.stage is Stage.RETURNED:
            name = self._name(worker)
            self._end(End.FAILED, f"{name} had returned from fn, but its value is lost: {why}", worker.number)
        elif worker.stage is not Stage.GONE:
            self._lose(worker, Loss.LOST, why, now)

    def _agent_leaving(self, event: AgentLeaving, now: float) -> None:
        agent = self.agents.get(event.agent)
        if agent is None or agent.leaving is not None or self.verdict is not None:
            return
        agent.leaving = event.why
        self._note(f"the executor of {self._name_of_agent(agent)} will go ({event.why}): it leaves at the next commit")

    # ---- workers --------------------------------------------------------------------------------------------------

    def _staff(self, now: float) -> None:
        """Start workers where there are none, and let the agents go whose executors are to."""
        for agent in [agent for agent in self.agents.values() if agent.leaving is not None and agent.worker is None]:
            del self.agents[agent.number]
            self._out.append(EndAgent(agent.number, again=True))
        idle = [
            agent
            for agent in self.agents.values()
            if agent.worker is None
            and agent.leaving is None
            and agent.not_before <= now
            and not self._exclusion.excluded(agent.host, now)
        ]
        if not self._begun and not self._may_begin(len(idle), now):
            return
        self._begun = True
        if not idle:
            return
        old = sorted((worker for worker in self.workers.values() if worker.alive), key=lambda each: each.seniority)
        # New ranks of one host next to each other, behind those that are there.
        first_seen = {agent.host: place for place, agent in reversed(list(enumerate(self.agents.values())))}
        idle.sort(key=lambda agent: (first_seen[agent.host], agent.slot))
        places = WorldLayout.of_ranks([worker.host for worker in old] + [agent.host for agent in idle]).ranks
        for agent, place in zip(idle, places[len(old) :], strict=False):
            number = len(self.workers)
            self.workers[number] = Worker(number, agent.number, agent.host, agent.task)
            agent.worker = number
            self._out.append(StartWorker(agent.number, number, place, agent.slot))

    def _may_begin(self, there: int, now: float) -> bool:
        limits = self.limits
        assert self._since is not None
        if there < limits.num_proc:
            self._enough_since = None
        elif self._enough_since is None:
            self._enough_since = now
        if there >= limits.max_num_proc or (self._enough_since is not None and now - self._enough_since >= SETTLE):
            return True
        if now - self._since < limits.start_timeout:
            return False
        if there < limits.min_num_proc:
            self._end(
                End.NOT_STARTED,
                f"{there} tasks had started after start_timeout={limits.start_timeout:g} s, min_num_proc="
                f"{limits.min_num_proc}: give the application more executors or cores, wait for the jobs that hold "
                "them, or ask for fewer ranks",
            )
            return False
        self._note(f"{there} ranks instead of num_proc={limits.num_proc}: no more tasks have started")
        return True

    def _entered(self, event: Entered, now: float) -> None:
        worker = self._alive(event.worker)
        if worker is None:
            return
        generation = self.generation
        if generation is not None and worker.number in generation.members and not generation.finished:
            self._close(generation, f"{self._name(worker)} has left it", now, failed=not generation.updating)
        worker.stage = Stage.WAITING

    def _ready(self, event: Ready, now: float) -> None:
        generation = self._member_of(event.worker, event.generation)
        if generation is None:
            return
        generation.ready.add(event.worker)
        generation.store = event.store or generation.store
        if len(generation.ready) == len(generation.members) and generation.store is not None:
            for agent, number in self._agents_of(generation.members):
                self._out.append(Go(agent, number, generation.number, generation.store))

    def _joined(self, event: Joined, now: float) -> None:
        generation = self._member_of(event.worker, event.generation)
        if generation is None:
            return
        generation.joined.add(event.worker)
        if generation.trains:
            generation.deadline = None

    def _broken(self, event: Broken, now: float) -> None:
        generation = self._member_of(event.worker, event.generation)
        if generation is not None:
            self._close(generation, f"{self._name(self.workers[event.worker])}: {event.error}", now, failed=True)

    def _yielded(self, event: Yielded, now: float) -> None:
        generation = self._member_of(event.worker, event.generation)
        if generation is not None:
            self._close(generation, "its members change", now, failed=False)

    def _committed(self, event: Committed, now: float) -> None:
        worker = self._alive(event.worker)
        if worker is None:
            return
        before, worker.commits = worker.commits, event.commits
        if event.commits > max(self._commits, 0):
            self._fruitless = 0
        if 0 <= before < event.commits:  # a new one's first is that which it was given
            self._exclusion.succeeded(worker.host, worker.task)
            if worker.agent in self.agents:
                self.agents[worker.agent].failures = 0
        self._commits = max(self._commits, event.commits)

    def _finished(self, event: Finished, now: float) -> None:
        generation = self._member_of(event.worker, event.generation)
        if generation is None:
            return
        self.workers[event.worker].stage = Stage.FINISHED
        if all(self.workers[number].stage is Stage.FINISHED for number in generation.members):
            generation.finished = True
            for agent, number in self._agents_of(generation.members):
                self._out.append(Finish(agent, number, generation.number))

    def _ended(self, event: Ended, now: float) -> None:
        worker = self.workers[event.worker]
        agent = self.agents.get(worker.agent)
        if event.loss is not None and agent is not None and agent.worker == worker.number:
            agent.worker = None
        if not worker.alive or self.verdict is not None:
            return
        if event.loss is None:
            self._returned(worker, now)
        else:
            worker.raised = event.raised
            self._lose(worker, event.loss, event.error, now)

    def _returned(self, worker: Worker, now: float) -> None:
        generation = self.generation
        worker.stage = Stage.RETURNED
        if generation is None or worker.number not in generation.members or not generation.finished:
            others = [each for each in self.workers.values() if each.alive]
            if generation is not None or any(each.stage is Stage.WAITING for each in others):
                self._end(
                    End.FAILED,
                    f"{self._name(worker)} returned from fn without having called its elastic function to the end, for "
                    "which other ranks wait. Every rank has to call the function decorated with hvd.elastic.run",
                    worker.number,
                )
            elif not others:  # fn has no elastic function
                self._done(sorted(number for number, each in self.workers.items() if each.stage is Stage.RETURNED))
        elif all(self.workers[number].stage is Stage.RETURNED for number in generation.members):
            self._done(generation.members)

    def _lose(self, worker: Worker, loss: Loss, error: str, now: float) -> None:
        """A worker is no more; its agent may be."""
        generation = self.generation
        name = self._name(worker)
        worker.stage, worker.loss = Stage.GONE, loss
        self._last_error = worker.number, f"{name} {error}"
        self._note(f"{name} {error}")
        if loss is Loss.FAILED:
            self._count_failure(worker, now)
        if generation is None or worker.number not in generation.members:
            return
        if generation.finished:
            text = f"{name}, after the elastic function had returned on all ranks: {error}"
            self._end(End.FAILED, text, worker.number)
        elif all(self.workers[number].raised for number in generation.members):
            first = self.workers[generation.members[0]]
            self._end(End.FAILED, "fn raised an exception on every rank", first.number)
        else:
            self._close(generation, f"{name} {error}", now, failed=True)

    def _count_failure(self, worker: Worker, now: float) -> None:
        agent = self.agents.get(worker.agent)
        if agent is not None:
            agent.failures += 1
            if agent.failures > 1:
                agent.not_before = now + min(_BACKOFF * 2.0 ** (agent.failures - 2), _GREATEST_BACKOFF)
        seconds = self._exclusion.failed(worker.host, worker.task, now)
        if seconds is not None:
            how_long = "for ever" if seconds == float("inf") else f"for {seconds:.0f} s"
            self._note(
                f"host {worker.host} gets no new ranks {how_long}: {self.limits.host_failure_limit} of its ranks have "
                "failed without a commit in between"
            )

    # ---- generations ----------------------------------------------------------------------------------------------

    def _close(self, generation: Generation, why: str, now: float, *, failed: bool) -> None:
        """A generation is over; its members are to come back."""
        if generation.over is not None or self.verdict is not None:
            return
        generation.over, generation.failed = why, failed
        generation.deadline = now + self.limits.rejoin_timeout
        if not failed:
            return  # they come by themselves
        for agent, number in self._agents_of(generation.members):
            if self.workers[number].stage in (Stage.MEMBER, Stage.FINISHED):
                self._out.append(Reset(agent, number, generation.number, why))
        self.resets += 1
        limit = self.limits.reset_limit
        if limit is not None and self.resets > limit:
            self._end(
                End.RESET_LIMIT,
                f"the ranks had to meet again {self.resets} times after a failure, reset_limit={limit}; last: {why}",
                self._last_error[0] if self._last_error else None,
            )

    def _missing(self) -> list[int]:
        """The members of the present generation that are neither gone nor back."""
        assert self.generation is not None
        members = map(self.workers.__getitem__, self.generation.members)
        return [worker.number for worker in members if worker.stage in (Stage.MEMBER, Stage.FINISHED)]

    def _watch_deadline(self, now: float) -> None:
        generation = self.generation
        if generation is None or generation.deadline is None or now < generation.deadline or generation.finished:
            return
        generation.deadline = None
        seconds = self.limits.rejoin_timeout
        if generation.over is not None:
            late, why = self._missing(), f"did not come back within rejoin_timeout={seconds:g} s"
        else:
            late = [number for number in generation.members if number not in generation.joined]
            if len(generation.ready) < len(generation.members):
                late = [number for number in generation.members if number not in generation.ready]
            why = f"did not join the others within rejoin_timeout={seconds:g} s"
        for agent, number in list(self._agents_of(late)):
            self._out.append(StopWorker(agent, number, why))
            self._lose(self.workers[number], Loss.HUNG, why, now)

    def _form(self, now: float) -> None:
        """Form the next generation, if the last is over and there are enough workers."""
        last = self.generation
        if self.verdict is not None or not self._begun:
            return
        if last is not None and ((last.over is None and not last.finished) or self._missing()):
            return
        waiting = sorted(
            (worker for worker in self.workers.values() if worker.stage is Stage.WAITING),
            key=lambda each: each.seniority,
        )
        if last is not None and last.finished and not any(worker.number in last.members for worker in waiting):
            return  # no member wants another: the run is about to end
        candidates = self._stayers(waiting)
        if last is None and len(candidates) < self.limits.num_proc and self._preparing():
            return
        if len(candidates) < self.limits.min_num_proc:
            self._too_few(len(candidates), now)
            return
        self._short_since = None
        if last is not None and not self._was_fruitful(last):
            return
        chosen = candidates[: self.limits.max_num_proc]
        if self._commits > 0 and all(worker.commits < 0 for worker in chosen):
            self._end(
                End.STATE_LOST,
                f"all ranks that had the state are gone ({self._commits} commits are lost), and ranks that start anew "
                "do not have it. Save checkpoints (hvd.checkpoint) if all executors may go at once",
                self._last_error[0] if self._last_error else None,
            )
            return
        self._assign(chosen, 0 if last is None else last.number + 1, now)

    def _stayers(self, waiting: list[Worker]) -> list[Worker]:
        """Those who wait, without those who are to leave: these may go, once others have the state."""
        leaving = [worker for worker in waiting if self._leaves(worker)]
        staying = [worker for worker in waiting if not self._leaves(worker)]
        if self._commits > 0 and all(worker.commits < 0 for worker in staying):
            return waiting  # somebody has to hand the state over
        for agent, number in self._agents_of(worker.number for worker in leaving):
            self._out.append(Dismiss(agent, number))
            self.workers[number].stage = Stage.GONE
        return staying

    def _assign(self, chosen: list[Worker], number: int, now: float) -> None:
        places = WorldLayout.of_ranks([worker.host for worker in chosen]).ranks
        members = tuple(worker.number for worker in chosen)
        if self.generation is not None:
            self._note(
                f"generation {number}: {len(chosen)} ranks, after {self.generation.over or 'the last had ended'}"
            )
        self.generation = Generation(number, members, self._commits, now + self.limits.rejoin_timeout)
        for worker, place in zip(chosen, places, strict=True):
            worker.stage, worker.rank = Stage.MEMBER, place.rank
            self._out.append(Assign(worker.agent, worker.number, number, place))

    def _was_fruitful(self, last: Generation) -> bool:
        """Count generations that failed before anything was committed; False when that ends the run."""
        failures = [number for number in last.members if self.workers[number].loss is Loss.FAILED]
        if failures and self._commits <= max(last.commits, 0):
            self._fruitless += 1
            limit = self.limits.fruitless_limit
            if self._fruitless >= limit:
                self._end(
                    End.FAILED, f"{limit} times in a row a rank failed before anything was committed", failures[0]
                )
                return False
        return True

    def _too_few(self, there: int, now: float) -> None:
        limits = self.limits
        if self._short_since is None:
            self._short_since = now
        culprit, error = self._last_error or (None, "")
        staffed = {worker.agent for worker in self.workers.values() if worker.alive}
        hopeless = [a for a in self.agents.values() if self._exclusion.for_ever(a.host) and a.number not in staffed]
        if len(self.agents) >= limits.max_num_proc and len(self.agents) - len(hopeless) < limits.min_num_proc:
            hosts = ", ".join(sorted({agent.host for agent in hopeless}))
            self._end(
                End.FAILED,
                f"{there} ranks are left, min_num_proc={limits.min_num_proc}, and hosts get no new ones after "
                f"{limits.host_failure_limit} failures without a commit: {hosts}; last: {error}",
                culprit,
            )
        elif now - self._short_since >= limits.elastic_timeout:
            self._end(
                End.TOO_FEW,
                f"{there} ranks for elastic_timeout={limits.elastic_timeout:g} s, min_num_proc={limits.min_num_proc}: "
                f"no more executors have come. Give the application more, or a smaller min_num_proc=; last: {error}",
                culprit,
            )

    def _want_update(self) -> None:
        """Tell the members to stop at their next commit, if others are to take part in the next generation."""
        generation = self.generation
        if self.verdict is not None or generation is None or not generation.trains or generation.updating:
            return
        members = [self.workers[number] for number in generation.members]
        if any(worker.stage is not Stage.MEMBER for worker in members):
            return
        waiting = [each for each in self.workers.values() if each.stage is Stage.WAITING and not self._leaves(each)]
        stay = [worker for worker in members if not self._leaves(worker)]
        grows = bool(waiting) and len(stay) < self.limits.max_num_proc
        shrinks = len(stay) < len(members) and (stay or waiting)
        if grows or shrinks:
            generation.updating = True
            for agent, number in self._agents_of(generation.members):
                self._out.append(Update(agent, number, generation.number))

    # ---- ends -----------------------------------------------------------------------------------------------------

    def _done(self, ranks: Iterable[int]) -> None:
        self._end(End.DONE, ranks=tuple(ranks))

    def _end(self, end: End, text: str = "", culprit: int | None = None, ranks: tuple[int, ...] = ()) -> None:
        self.verdict = Verdict(end, text, culprit, ranks)
        self._out += [EndAgent(agent) for agent in self.agents]

    # ---- looking up -----------------------------------------------------------------------------------------------

    def _alive(self, number: int) -> Worker | None:
        worker = self.workers[number]
        return worker if worker.alive and self.verdict is None else None

    def _member_of(self, number: int, generation: int) -> Generation | None:
        """The present generation, if a worker is a living member of it and it is not over."""
        present = self.generation
        if present is None or present.number != generation or present.over is not None or present.finished:
            return None
        return present if number in present.members and self._alive(number) is not None else None

    def _agents_of(self, workers: Iterable[int]) -> Iterable[tuple[int, int]]:
        """(agent, worker) of those workers that are alive."""
        return [(self.workers[number].agent, number) for number in workers if self.workers[number].alive]

    def _leaves(self, worker: Worker) -> bool:
        return worker.agent in self.agents and self.agents[worker.agent].leaving is not None

    def _preparing(self) -> bool:
        return any(worker.stage is Stage.PREPARING for worker in self.workers.values())

    def _note(self, text: str) -> None:
        self._out.append(Note(text))

    def _name(self, worker: Worker) -> str:
        place = f"a new rank (number {worker.number})" if worker.rank is None else f"rank {worker.rank}"
        return f"{place} on host {worker.host}"

    def _name_of_agent(self, agent: Agent) -> str:
        return f"task {agent.task} on {agent.host}" if agent.worker is None else self._name(self.workers[agent.worker])
