"""Membership's decisions at each event, computed in a simple way: lists of agents, workers and one current world."""

from __future__ import annotations

import re

from spark_hvd.runner.elastic.membership import events as ev
from spark_hvd.world.layout import WorldLayout
from tests.world.records import Agent, Kept, Worker, World

Told = ev.Decision | str
"""A decision; for a note, its words."""
SETTLE, PAUSE, LONGEST_PAUSE = 1.0, 0.5, 16.0


class Members(Kept):
    """Takes the same events as a membership.

    Args:
        limits: The run's limits.
    """

    def __init__(self, limits: ev.Limits) -> None:
        super().__init__(limits)
        self.resets = self.futile = 0
        self.commits = -1
        self._out: list[Told] = []
        self._first_ones = 0
        self._some_behind = False
        self._first_look: float | None = None
        self._enough_since: float | None = None
        self._short_since: float | None = None
        self._apart_since: float | None = None
        self._last_lost: int | None = None
        self._failures: dict[str, list[int]] = {}
        """For each host: the task of each failure that counts."""
        self._exclusions: dict[str, list[tuple[float, float]]] = {}
        """For each host: the start and end of its exclusion."""

    def handle(self, event: ev.Event, now: float, told: list[ev.Decision]) -> list[Told]:
        """Return the decisions; the lengths of exclusions are read from the product's notes."""
        self._told = told
        getattr(self, f"_{type(event).__name__.lower()}")(event, now)
        return [] if isinstance(event, ev.Committed) else self.tick(now, told)

    def tick(self, now: float, told: list[ev.Decision]) -> list[Told]:
        """Do the same for passing time."""
        self._told = told
        if self.verdict is None:
            self._end_the_late(now)
            self._start_workers(now)
            self._make_world(now)
            self._change_world()
        out, self._out = self._out, []
        return out

    def stop(self) -> list[Told]:
        """The caller ends the run."""
        if self.verdict is None:
            self._ends(ev.End.STOPPED, "", None)
        out, self._out = self._out, []
        return out

    # ---- events -----------------------------------------------------------------------------------------------------

    def _agentup(self, event: ev.AgentUp, now: float) -> None:
        if self.verdict is not None:
            self._out.append(ev.EndAgent(event.agent))
            return
        for agent in [agent for agent in self.agents.values() if agent.task == event.task]:
            self._drop(agent, now)
        slots = [agent.slot for agent in self.agents.values() if agent.host == event.host]
        slot = min(set(range(len(slots) + 1)) - set(slots))
        self.agents[event.agent] = Agent(event.agent, event.host, event.task, slot)

    def _agentlost(self, event: ev.AgentLost, now: float) -> None:
        if event.agent in self.agents:
            self._drop(self.agents[event.agent], now)

    def _drop(self, agent: Agent, now: float) -> None:
        del self.agents[agent.number]
        if agent.worker is None or self.verdict is not None:
            return
        worker = self.workers[agent.worker]
        if worker.state == "returned":
            self._ends(ev.End.FAILED, "value is lost", worker.number)
        elif worker.state != "gone":
            self._short_since = None if self.world is None else self._short_since
            self._lose(worker, now)

    def _agentleaving(self, event: ev.AgentLeaving, now: float) -> None:
        agent = self.agents.get(event.agent)
        if agent is not None and not agent.leaving and self.verdict is None:
            agent.leaving = True
            who = f"task {agent.task} on" if agent.worker is None else self._name(self.workers[agent.worker])
            self._out.append(f"the executor of {who}")

    def _entered(self, event: ev.Entered, now: float) -> None:
        worker, world = self.workers[event.worker], self.world
        if not self._alive(worker) or self.verdict is not None:
            return
        if world is not None and worker.number in world.members and not world.finished:
            self._close(now, failed=not world.updating)
        worker.state = "waiting"
        self._look_for_early_ends()

    def _ready(self, event: ev.Ready, now: float) -> None:
        if (world := self._its_world(event)) is not None:
            world.ready.add(event.worker)
            world.store = event.store or world.store
            if world.ready == set(world.members) and world.store is not None:
                self._out += [ev.Go(*to, world.number, world.store) for to in self._addresses()]

    def _joined(self, event: ev.Joined, now: float) -> None:
        if (world := self._its_world(event)) is not None:
            world.joined.add(event.worker)
            if world.joined == set(world.members):
                world.deadline = None

    def _broken(self, event: ev.Broken, now: float) -> None:
        if self._its_world(event) is not None:
            self._close(now, failed=True)

    def _yielded(self, event: ev.Yielded, now: float) -> None:
        if self._its_world(event) is not None:
            self._close(now, failed=False)

    def _committed(self, event: ev.Committed, now: float) -> None:
        worker, world = self.workers[event.worker], self.world
        if not self._alive(worker) or self.verdict is not None:
            return
        before, worker.commits = worker.commits, event.commits
        if event.commits > max(self.commits, 0):
            self.futile = 0
        self.commits = max(self.commits, event.commits)
        if 0 <= before < event.commits and world is not None and worker.number in world.members:
            for member in self._members():
                self._failures[member.host] = [t for t in self._failures.get(member.host, []) if t != member.task]
                if member.agent in self.agents:
                    self.agents[member.agent].failures = 0

    def _finished(self, event: ev.Finished, now: float) -> None:
        if (world := self._its_world(event)) is not None:
            self.workers[event.worker].state = "finished"
            if all(member.state == "finished" for member in self._members()):
                world.finished = True
                for member in self._members():
                    member.later = True
                self._out += [ev.Finish(*to, world.number) for to in self._addresses()]

    def _ended(self, event: ev.Ended, now: float) -> None:
        worker = self.workers[event.worker]
        agent = self.agents.get(worker.agent)
        if event.loss is not None and agent is not None and agent.worker == worker.number:
            agent.worker = None
        if not self._alive(worker) or self.verdict is not None:
            return
        if event.loss is not None:
            worker.raised = event.raised
            self._lose(worker, now, failed=event.loss is ev.Loss.FAILED, text=event.error)
            return
        worker.state, world = "returned", self.world
        if world is not None and worker.number in world.members and world.finished:
            if all(member.state == "returned" for member in self._members()):
                self._ends(ev.End.DONE, "", None, tuple(world.members))
            else:
                self._look_for_early_ends()
        elif world is not None or any(other.state == "waiting" for other in self.workers):
            self._ends(ev.End.FAILED, "without having called its elastic function to the end", worker.number)

    # ---- what follows -----------------------------------------------------------------------------------------------

    def _look_for_early_ends(self) -> None:
        team = self.workers if self.world is None else self._members()
        early = [worker.number for worker in team if worker.state == "returned"]
        if early and any(worker.state == "waiting" for worker in team):
            self._ends(ev.End.FAILED, "without having called its elastic function to the end", early[0])

    def _lose(self, worker: Worker, now: float, *, failed: bool = False, text: str = "") -> None:
        world, name = self.world, self._name(worker)
        worker.state, worker.failed = "gone", failed
        self._last_lost = worker.number
        self._out.append(f"{name}: {text}")
        member = world is not None and worker.number in world.members
        if failed and not (world is not None and member and worker.host in world.blamed):
            self._count_failure(worker, now)
            if world is not None and member:
                world.blamed.add(worker.host)
        if world is None or not member:
            return
        if world.finished:
            self._ends(ev.End.FAILED, "after the elastic function had returned on all ranks", worker.number)
        elif all(other.raised for other in self._members()):
            self._ends(ev.End.FAILED, "fn raised an exception on every rank", world.members[0])
        else:
            self._close(now, failed=True)
            if world.failed and world.culprit is None:
                world.culprit = worker.number

    def _count_failure(self, worker: Worker, now: float) -> None:
        agent = self.agents.get(worker.agent)
        if agent is not None:
            agent.failures += 1
            if agent.failures > 1:
                agent.pause_until = now + min(PAUSE * 2 ** (agent.failures - 2), LONGEST_PAUSE)
        failures = self._failures.setdefault(worker.host, [])
        failures.append(worker.task)
        if len(failures) < self.limits.host_failure_limit:
            return
        failures.clear()
        text = f"host {worker.host} gets no new ranks"
        past = self._exclusions.setdefault(worker.host, [])
        notes = [each.text for each in self._told if isinstance(each, ev.Note) and each.text.startswith(text)]
        assert len(notes) == 1, f"{text}: {self._told}"
        if self.limits.cooldown is None:
            assert "for the rest of the run" in notes[0]
            past.append((now, float("inf")))
        else:
            found = re.search(r"for (\d+) s:", notes[0])
            assert found is not None, notes
            seconds, (least, most) = int(found[1]), self.limits.cooldown
            doubled = least * 2 ** len(past)
            assert min(doubled, most) - 0.5 <= seconds <= min(doubled * 1.25, most) + 0.5
            past.append((now, now + seconds))
        self._out.append(text)

    def _close(self, now: float, *, failed: bool) -> None:
        world = self.world
        assert world is not None
        if world.over or self.verdict is not None:
            return
        world.over, world.failed, world.deadline = True, failed, now + self.limits.rejoin_timeout
        if failed:
            self.resets += 1
            for member in self._members():
                if member.state in ("member", "finished"):
                    self._out.append(ev.Reset(member.agent, member.number, world.number, ""))

    def _end_the_late(self, now: float) -> None:
        world = self.world
        if world is None or world.deadline is None or now < world.deadline or world.finished:
            return
        world.deadline = None
        done = world.joined if len(world.ready) == len(world.members) else world.ready
        late = [
            member
            for member in self._members()
            if (member.state in ("member", "finished") if world.over else member.number not in done)
        ]
        what = "come back" if world.over else "join the others"
        for member in [member for member in late if self._alive(member)]:
            self._out.append(ev.StopWorker(member.agent, member.number, what))
            self._lose(member, now, text=f"did not {what} within")

    def _start_workers(self, now: float) -> None:
        for agent in [agent for agent in self.agents.values() if agent.leaving and agent.worker is None]:
            del self.agents[agent.number]
            self._out.append(ev.EndAgent(agent.number, again=True))
        idle = [agent for agent in self.agents.values() if self._may_start(agent, now)]
        if self._first_ones == 0:
            if not self._begins(len(idle), now):
                return
            self._first_ones = len(idle)
        if not idle:
            return
        hosts = [agent.host for agent in self.agents.values()]
        idle.sort(key=lambda each: (hosts.index(each.host), each.slot))
        old = [worker.host for worker in self._by_seniority(self.workers) if self._alive(worker)]
        places = WorldLayout.of_ranks(old + [agent.host for agent in idle]).ranks[len(old) :]
        for place, agent in sorted(zip(places, idle, strict=True), key=lambda each: each[0].rank):
            agent.worker = len(self.workers)
            self.workers.append(Worker(agent.worker, agent.number, agent.host, agent.task))
            self._out.append(ev.StartWorker(agent.number, agent.worker, place, agent.slot))

    def _may_start(self, agent: Agent, now: float) -> bool:
        if agent.worker is not None or agent.leaving or now < agent.pause_until:
            return False
        _, until = self._exclusions.get(agent.host, [(0.0, 0.0)])[-1]
        if abs(until - now) <= 0.51 and until < float("inf"):  # the note is rounded
            return any(isinstance(each, ev.StartWorker) and each.agent == agent.number for each in self._told)
        return now >= until

    def _begins(self, there: int, now: float) -> bool:
        limits = self.limits
        self._first_look = now if self._first_look is None else self._first_look
        if there < limits.num_proc:
            self._enough_since = None
        elif self._enough_since is None:
            self._enough_since = now
        settled = self._enough_since is not None and now - self._enough_since >= SETTLE
        if there >= limits.max_num_proc or settled:
            return True
        if now - self._first_look < limits.start_timeout:
            return False
        if there < limits.min_num_proc:
            self._ends(ev.End.NOT_STARTED, f"min_num_proc={limits.min_num_proc}", None)
            return False
        self._out.append(f"{there} ranks instead of")
        return True

    def _make_world(self, now: float) -> None:
        last, limits = self.world, self.limits
        if self.verdict is not None or self._first_ones == 0:
            return
        if last is not None and not (last.over or last.finished):
            return
        if any(member.state in ("member", "finished") for member in self._members()):
            return
        returned = tuple(worker.number for worker in self.workers if worker.state == "returned")
        if last is None and len(returned) >= self._first_ones and not any(map(self._alive, self.workers)):
            self._ends(ev.End.DONE, "", None, returned)
            return
        waiting = self._by_seniority([worker for worker in self.workers if worker.state == "waiting"])
        if last is not None and last.failed and limits.reset_limit is not None and self.resets > limits.reset_limit:
            self._ends(ev.End.RESET_LIMIT, f"reset_limit={limits.reset_limit}", last.culprit)
            return
        if last is not None and last.finished and not any(worker.number in last.members for worker in waiting):
            return
        candidates = [worker for worker in waiting if not self._leaves(worker)]
        if self.commits > 0 and all(worker.commits < 0 for worker in candidates):
            candidates = waiting
        else:
            for worker in [worker for worker in waiting if self._leaves(worker)]:
                worker.state = "gone"
                self._out.append(ev.Dismiss(worker.agent, worker.number))
        few = last is None and len(candidates) < limits.num_proc
        if few and any(worker.state == "preparing" for worker in self.workers):
            return
        if any(map(self._in_later_function, candidates)):
            fit = [worker for worker in candidates if not self._is_behind(worker)]
            candidates = fit if len(fit) >= limits.min_num_proc else candidates
        if len(candidates) < limits.min_num_proc:
            self._too_few(now)
            return
        self._short_since = None
        if last is not None and self._is_futile(last, now):
            return
        chosen = candidates[: limits.max_num_proc]
        if self.commits > 0 and all(worker.commits < 0 for worker in chosen):
            self._ends(ev.End.STATE_LOST, f"{self.commits} commits are lost", self._last_lost)
            return
        number = 0 if last is None else last.number + 1
        if last is not None:
            self._out.append(f"generation {number}: {len(chosen)} rank")
        self.world = World(number, [worker.number for worker in chosen], self.commits, now + limits.rejoin_timeout)
        for worker, place in zip(chosen, WorldLayout.of_ranks([each.host for each in chosen]).ranks, strict=True):
            worker.state, worker.rank = "member", place.rank
            self._out.append(ev.Assign(worker.agent, worker.number, number, place))

    def _too_few(self, now: float) -> None:
        limits = self.limits
        self._short_since = now if self._short_since is None else self._short_since
        returned = any(worker.state == "returned" for worker in self.workers)
        least = self._first_ones if returned else limits.min_num_proc  # values, if fn has no elastic function
        staffed = {worker.agent for worker in self.workers if worker.state != "gone"}
        excluded = [host for host, past in self._exclusions.items() if past[-1][1] == float("inf")]
        useless = [each for each in self.agents.values() if each.host in excluded and each.number not in staffed]
        if len(self.agents) >= limits.max_num_proc and len(self.agents) - len(useless) < least:
            self._ends(ev.End.FAILED, "hosts get no new ranks", self._last_lost)
        elif now - self._short_since >= limits.elastic_timeout:
            self._ends(ev.End.TOO_FEW, f"elastic_timeout={limits.elastic_timeout:g} s", self._last_lost)

    def _is_futile(self, last: World, now: float) -> bool:
        failed = [member.number for member in self._members() if member.failed]
        if failed and self.commits <= max(last.commits, 0):
            self.futile += 1
            if self.futile >= self.limits.no_progress_limit:
                self._ends(ev.End.FAILED, f"{self.futile} times in a row", failed[0])
                return True
        if last.joined == set(last.members):
            self._apart_since = None
        elif self._apart_since is None:
            self._apart_since = now
        elif now - self._apart_since >= self.limits.elastic_timeout:
            self._ends(ev.End.FAILED, "the ranks could not meet", [last.culprit, last.members[0]][last.culprit is None])
            return True
        return False

    def _change_world(self) -> None:
        world, members = self.world, self._members()
        if self.verdict is not None or world is None or world.over or world.finished or world.updating:
            return
        if world.joined != set(world.members) or any(member.state != "member" for member in members):
            return
        waiting = self._by_seniority([worker for worker in self.workers if worker.state == "waiting"])
        if any(map(self._in_later_function, members)):
            behind = [worker for worker in waiting if self._is_behind(worker)]
            waiting = [worker for worker in waiting if worker not in behind]
            if behind and not self._some_behind:
                self._some_behind = True
                self._out.append(f"{self._name(behind[0])} takes no part")
        stay = sum(not self._leaves(member) for member in members)
        more = not all(map(self._leaves, waiting))
        if (more and stay < self.limits.max_num_proc) or (stay < len(members) and (stay or more)):
            world.updating = True
            self._out += [ev.Update(*to, world.number) for to in self._addresses()]

    def _ends(self, end: ev.End, text: str, culprit: int | None, ranks: tuple[int, ...] = ()) -> None:
        self.verdict = end, text, culprit, ranks
        self._out += [ev.EndAgent(agent) for agent in self.agents]
