"""Elastic membership as a pure state machine: events and clock ticks in, decisions out.

    agents arrive  ->  workers start, prepare, and ask for a generation  ->  a generation connects and trains
    a member is lost, or its collectives fail   ->  the generation is over: the others are told, and ask for the next
    workers wait, or a member has to leave      ->  the members are told, and ask for the next one at their next commit
    the elastic function has returned on all    ->  the members leave it; once fn has returned, too, the run is done

A generation is formed only after every member of the last one has asked for it or is gone, so two worlds never overlap.
A member that does not return in time is stopped. Survivors keep their order and precede new workers.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from spark_hvd.runner.elastic.membership import events as ev
from spark_hvd.runner.elastic.membership import texts
from spark_hvd.runner.elastic.membership.policy import FailurePolicy, Start, StartPolicy
from spark_hvd.runner.elastic.membership.records import AgentRecord, GenerationRecord, Stage, Worker
from spark_hvd.runner.elastic.membership.roster import Exclusion, Roster
from spark_hvd.world.layout import WorldLayout
from spark_hvd.world.words import count


class Membership:
    """See the module's description.

    Attributes:
        roster: The agents and workers.
        generation: The current generation, or the last one; None before the first.
        policy: Decides when the run must end.
        verdict: How the run has ended; None until it has.
    """

    def __init__(self, limits: ev.Limits, chance: random.Random | None = None) -> None:
        self.limits = limits
        self.roster = Roster(Exclusion(limits.host_failure_limit, limits.cooldown, chance or random.Random()))
        self.generation: GenerationRecord | None = None
        self.policy = FailurePolicy(limits)
        self.verdict: ev.Verdict | None = None
        self._out: list[ev.Decision] = []
        self._start_policy = StartPolicy(limits)
        self._first_workers = 0  # how many the run began with; 0 before it has
        self._some_behind = False

    def handle(self, event: ev.Event, now: float) -> list[ev.Decision]:
        """Handle one event. Events of workers and generations that are over change nothing."""
        handlers: dict[type, Callable[[Any, float], None]] = {
            ev.AgentUp: self._agent_up,
            ev.AgentLost: self._agent_lost,
            ev.AgentLeaving: self._agent_leaving,
            ev.Entered: self._entered,
            ev.Ready: self._ready,
            ev.Joined: self._joined,
            ev.Broken: self._broken,
            ev.Yielded: self._yielded,
            ev.Committed: self._committed,
            ev.Finished: self._finished,
            ev.Ended: self._ended,
        }
        handlers[type(event)](event, now)
        if isinstance(event, ev.Committed):  # frequent, and no decision follows from it
            return []
        return self.tick(now)

    def tick(self, now: float) -> list[ev.Decision]:
        """Decide what follows from the time; call this several times a second."""
        if self.verdict is None:
            self._watch_deadline(now)
            self._staff(now)
            self._form(now)
            self._want_update()
        return self._take_out()

    def stop(self, text: str) -> list[ev.Decision]:
        """End the run because the caller wants it."""
        if self.verdict is None:
            self._end(ev.End.STOPPED, text)
        return self._take_out()

    @property
    def waits_for_the_silent(self) -> bool:
        """Whether a generation is over, but some of its members have not answered and may be gone."""
        generation = self.generation
        return (
            self.verdict is None
            and generation is not None
            and generation.over is not None
            and self.roster.missing(generation) != []
        )

    # ---- agents ---------------------------------------------------------------------------------------------------

    def _agent_up(self, event: ev.AgentUp, now: float) -> None:
        if self.verdict is not None:
            self._out.append(ev.EndAgent(event.agent))
            return
        for agent in [agent for agent in self.roster.agents.values() if agent.task == event.task]:
            self._drop_agent(agent, "Spark has restarted its task", now)
        self.roster.add_agent(event.agent, event.host, event.task)

    def _agent_lost(self, event: ev.AgentLost, now: float) -> None:
        if event.agent in self.roster.agents:
            self._drop_agent(self.roster.agents[event.agent], event.why, now)

    def _drop_agent(self, agent: AgentRecord, why: str, now: float) -> None:
        del self.roster.agents[agent.number]
        worker = None if agent.worker is None else self.roster.workers[agent.worker]
        if worker is None or self.verdict is not None:
            return
        if worker.stage is Stage.RETURNED:
            self._end(ev.End.FAILED, texts.VALUE_LOST.format(name=self.roster.name(worker), why=why), worker.number)
        elif worker.stage is not Stage.GONE:
            self._lose(worker, ev.Loss.LOST, why, now)

    def _agent_leaving(self, event: ev.AgentLeaving, now: float) -> None:
        agent = self.roster.agents.get(event.agent)
        if agent is None or agent.leaving is not None or self.verdict is not None:
            return
        agent.leaving = event.why
        self._note(
            f"the executor of {self.roster.name_of_agent(agent)} will leave ({event.why}): it leaves at the next commit"
        )

    # ---- workers --------------------------------------------------------------------------------------------------

    def _staff(self, now: float) -> None:
        """Start workers on idle agents, and end the agents whose executors will leave."""
        for agent in [each for each in self.roster.agents.values() if each.leaving is not None and each.worker is None]:
            del self.roster.agents[agent.number]
            self._out.append(ev.EndAgent(agent.number, again=True))
        idle = self.roster.idle(now)
        if self._first_workers == 0:
            start = self._start_policy.decide(len(idle), now)
            if start is Start.NEVER:
                self._end(
                    ev.End.NOT_STARTED, texts.NOT_STARTED.format(tasks=count(len(idle), "task"), limits=self.limits)
                )
            if start in (Start.NEVER, Start.WAIT):
                return
            if start is Start.GO_WITH_FEWER:
                self._note(f"{len(idle)} ranks instead of num_proc={self.limits.num_proc}: no more tasks have started")
            self._first_workers = len(idle)
        if not idle:
            return
        placed = zip(self.roster.places_of(idle), idle, strict=True)
        for place, agent in sorted(placed, key=lambda each: each[0].rank):  # so first workers' numbers are their ranks
            worker = self.roster.add_worker(agent)
            self._out.append(ev.StartWorker(agent.number, worker.number, place, agent.slot))

    def _entered(self, event: ev.Entered, now: float) -> None:
        if (worker := self._alive(event.worker)) is None:
            return
        generation = self.generation
        if generation is not None and worker.number in generation.members and not generation.finished:
            self._close(generation, f"{self.roster.name(worker)} has left it", now, failed=not generation.updating)
        worker.stage = Stage.WAITING
        self._end_if_returned_early()

    def _ready(self, event: ev.Ready, now: float) -> None:
        if (generation := self._member_of(event.worker, event.generation)) is None:
            return
        generation.ready.add(event.worker)
        generation.store = event.store or generation.store
        if len(generation.ready) == len(generation.members) and generation.store is not None:
            for agent, number in self.roster.addresses(generation.members):
                self._out.append(ev.Go(agent, number, generation.number, generation.store))

    def _joined(self, event: ev.Joined, now: float) -> None:
        if (generation := self._member_of(event.worker, event.generation)) is None:
            return
        generation.joined.add(event.worker)
        if generation.trains:
            generation.deadline = None

    def _broken(self, event: ev.Broken, now: float) -> None:
        generation = self._member_of(event.worker, event.generation)
        if generation is not None:
            error = event.error.splitlines()[0][:200]
            self._close(generation, f"{self.roster.name(self.roster.workers[event.worker])}: {error}", now, failed=True)

    def _yielded(self, event: ev.Yielded, now: float) -> None:
        generation = self._member_of(event.worker, event.generation)
        if generation is not None:
            self._close(generation, "a change of members", now, failed=False)

    def _committed(self, event: ev.Committed, now: float) -> None:
        if (worker := self._alive(event.worker)) is None:
            return
        before, worker.commits = worker.commits, event.commits
        self.policy.committed(event.commits)
        # A new worker's first report is the state that it was given. A later report means that the whole world has the
        # commit, so it counts for all members: the report of some may arrive only after that of a failure.
        generation = self.generation
        if 0 <= before < event.commits and generation is not None and worker.number in generation.members:
            for number in generation.members:
                self.roster.count_commit(self.roster.workers[number])

    def _finished(self, event: ev.Finished, now: float) -> None:
        if (generation := self._member_of(event.worker, event.generation)) is None:
            return
        self.roster.workers[event.worker].stage = Stage.FINISHED
        if all(self.roster.workers[number].stage is Stage.FINISHED for number in generation.members):
            generation.finished = True
            for agent, number in self.roster.addresses(generation.members):
                self.roster.workers[number].functions += 1
                self._out.append(ev.Finish(agent, number, generation.number))

    def _ended(self, event: ev.Ended, now: float) -> None:
        worker = self.roster.workers[event.worker]
        agent = self.roster.agents.get(worker.agent)
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
            if generation is not None or self.roster.waiting():
                self._end(ev.End.FAILED, texts.RETURNED_EARLY.format(name=self.roster.name(worker)), worker.number)
        elif all(self.roster.workers[number].stage is Stage.RETURNED for number in generation.members):
            self._end(ev.End.DONE, ranks=generation.members)
        else:
            self._end_if_returned_early()

    def _end_if_returned_early(self) -> None:
        """End the run if a worker waits for a generation that a returned worker can no longer join."""
        generation = self.generation
        team = self.roster.workers if generation is None else generation.members
        workers = [self.roster.workers[number] for number in team]
        early = [worker for worker in workers if worker.stage is Stage.RETURNED]
        if early and any(worker.stage is Stage.WAITING for worker in workers):
            self._end(ev.End.FAILED, texts.RETURNED_EARLY.format(name=self.roster.name(early[0])), early[0].number)

    def _lose(self, worker: Worker, loss: ev.Loss, error: str, now: float) -> None:
        """Record that a worker is gone; its agent may still exist."""
        generation = self.generation
        name = self.roster.name(worker)
        worker.stage, worker.loss = Stage.GONE, loss
        self.policy.lost(worker, f"{name}: {error}")
        self._note(f"{name}: {error}")
        if loss is ev.Loss.FAILED:
            self._count_failure(worker, now)
        if generation is None:
            self.policy.enough()  # the time for a new worker begins again: this one may have worked for hours
        if generation is None or worker.number not in generation.members:
            return
        if generation.finished:
            self._end(ev.End.FAILED, texts.FAILED_AFTER.format(name=name, error=error), worker.number)
        elif all(self.roster.workers[number].raised for number in generation.members):
            first = self.roster.workers[generation.members[0]]
            self._end(ev.End.FAILED, texts.ALL_RAISED.format(name=name, error=texts.brief(error)), first.number)
        else:
            self._close(generation, f"{name}: {error}", now, failed=True)
            if generation.failed and generation.culprit is None:  # others have only reported that the worker is gone
                generation.over, generation.culprit = f"{name}: {error}", worker.number

    def _count_failure(self, worker: Worker, now: float) -> None:
        generation = self.generation
        if generation is not None and worker.number in generation.members:
            if worker.host in generation.blamed:  # several ranks of a host that fail together count once
                return
            generation.blamed.add(worker.host)
        seconds = self.roster.count_failure(worker, now)
        if seconds is not None:
            how_long = "for the rest of the run" if seconds == float("inf") else f"for {seconds:.0f} s"
            self._note(texts.EXCLUDED.format(host=worker.host, how_long=how_long, limits=self.limits))

    # ---- generations ----------------------------------------------------------------------------------------------

    def _close(self, generation: GenerationRecord, why: str, now: float, *, failed: bool) -> None:
        """End a generation, and give its members a deadline to return."""
        if generation.over is not None or self.verdict is not None:
            return
        generation.over, generation.failed = why, failed
        generation.deadline = now + self.limits.rejoin_timeout
        if not failed:
            return  # the members return on their own
        for agent, number in self.roster.addresses(generation.members):
            if self.roster.workers[number].stage in (Stage.MEMBER, Stage.FINISHED):
                self._out.append(ev.Reset(agent, number, generation.number, why))
        self.policy.resets += 1

    def _watch_deadline(self, now: float) -> None:
        generation = self.generation
        if generation is None or generation.deadline is None or now < generation.deadline or generation.finished:
            return
        generation.deadline = None
        late, what = self.roster.late(generation)
        why = f"did not {what} within rejoin_timeout={self.limits.rejoin_timeout:g} s"
        for agent, number in self.roster.addresses(late):
            self._out.append(ev.StopWorker(agent, number, why))
            self._lose(self.roster.workers[number], ev.Loss.HUNG, why, now)

    def _form(self, now: float) -> None:
        """Form the next generation if the last one is over and there are enough workers."""
        last = self.generation
        if self.verdict is not None or self._first_workers == 0:
            return
        if last is not None and ((last.over is None and not last.finished) or self.roster.missing(last)):
            return
        if last is None and not self.roster.alive() and len(returned := self.roster.returned()) >= self._first_workers:
            self._end(ev.End.DONE, ranks=tuple(returned))  # fn has no elastic function: none takes over from another
            return
        waiting = self.roster.waiting()
        if last is not None and last.failed and self._ends(self.policy.too_many_resets(last)):
            return
        if last is not None and last.finished and not any(worker.number in last.members for worker in waiting):
            return  # no member wants another: the run is about to end
        candidates = self.roster.fellows(self._stayers(waiting), last, self.limits.min_num_proc)
        if last is None and len(candidates) < self.limits.num_proc and self.roster.preparing():
            return
        if len(candidates) < self.limits.min_num_proc:
            self._ends(self.policy.too_few(len(candidates), self._first_workers, self.roster, now))
            return
        self.policy.enough()
        if last is not None and self._ends(self.policy.futile(last, self.roster, now)):
            return
        chosen = candidates[: self.limits.max_num_proc]
        if not self._ends(self.policy.state_lost(chosen)):
            self._assign(chosen, 0 if last is None else last.number + 1, now)

    def _stayers(self, waiting: list[Worker]) -> list[Worker]:
        """Return the waiting workers that stay, and dismiss those that leave, unless only they have the state."""
        leaving = [worker for worker in waiting if self.roster.leaves(worker)]
        staying = [worker for worker in waiting if not self.roster.leaves(worker)]
        if self.policy.commits > 0 and all(worker.commits < 0 for worker in staying):
            return waiting  # one of them must hand over the state
        for agent, number in self.roster.addresses(worker.number for worker in leaving):
            self._out.append(ev.Dismiss(agent, number))
            self.roster.workers[number].stage = Stage.GONE
        return staying

    def _assign(self, chosen: list[Worker], number: int, now: float) -> None:
        places = WorldLayout.of_ranks([worker.host for worker in chosen]).ranks
        members = tuple(worker.number for worker in chosen)
        if self.generation is not None:
            after = self.generation.over or "the last had ended"
            self._note(f"generation {number}: {count(len(chosen), 'rank')}, after {after}")
        self.generation = GenerationRecord(number, members, self.policy.commits, now + self.limits.rejoin_timeout)
        for worker, place in zip(chosen, places, strict=True):
            worker.stage, worker.rank = Stage.MEMBER, place.rank
            self._out.append(ev.Assign(worker.agent, worker.number, number, place))

    def _want_update(self) -> None:
        """Tell the members to stop at their next commit if the next generation should have other members."""
        generation = self.generation
        if self.verdict is not None or generation is None or not generation.trains or generation.updating:
            return
        if (behind := self.roster.behind(generation)) and not self._some_behind:
            self._some_behind = True
            self._note(texts.BEHIND.format(name=self.roster.name(behind[0])))
        if self.roster.to_change(generation, self.limits.max_num_proc):
            generation.updating = True
            for agent, number in self.roster.addresses(generation.members):
                self._out.append(ev.Update(agent, number, generation.number))

    # ---- ends -----------------------------------------------------------------------------------------------------

    def _end(self, end: ev.End, text: str = "", culprit: int | None = None, ranks: tuple[int, ...] = ()) -> None:
        self._ends(ev.Verdict(end, text, culprit, ranks))

    def _ends(self, verdict: ev.Verdict | None) -> bool:
        if verdict is not None:
            self.verdict = verdict
            self._out += [ev.EndAgent(agent) for agent in self.roster.agents]
        return verdict is not None

    # ---- looking up -----------------------------------------------------------------------------------------------

    def _alive(self, number: int) -> Worker | None:
        worker = self.roster.workers[number]
        return worker if worker.alive and self.verdict is None else None

    def _member_of(self, number: int, generation: int) -> GenerationRecord | None:
        """Return the current generation if it is not over and has this worker as a living member."""
        current = self.generation
        if current is None or current.number != generation or current.over is not None or current.finished:
            return None
        return current if number in current.members and self._alive(number) is not None else None

    def _take_out(self) -> list[ev.Decision]:
        out, self._out = self._out, []
        return out

    def _note(self, text: str) -> None:
        self._out.append(ev.Note(text))
