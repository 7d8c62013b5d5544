"""The hub of an elastic run: messages of agents become events of membership, its decisions messages to agents.

A message's ``rank`` is the number of an agent here; which rank its worker has changes from generation to generation.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, fields
from typing import Any, ClassVar, get_args, get_type_hints

from spark_hvd.runner.channel.hub import HubServer, Listener
from spark_hvd.runner.channel.silence import SILENT_AFTER, AwakeClock, LivenessTracker
from spark_hvd.runner.channel.state import HubLogic, Kinds, Message, Send
from spark_hvd.runner.elastic.membership import events as ev
from spark_hvd.runner.elastic.membership.state import Membership
from spark_hvd.runner.outcome.rows import Packed
from spark_hvd.world.ports import PortRange

_SUSPECT_AFTER = 4.0
"""Seconds of silence after which an agent is given up while the others wait for it: their collectives have failed."""


_TOLD: dict[str, type[ev.Event]] = {
    ev.name_of(kind): kind for kind in get_args(ev.Event) if kind not in (ev.AgentUp, ev.AgentLost)
}
"""What agents tell of themselves and their workers."""
_PLAIN: dict[Any, Any] = {tuple[str, int] | None: list | None, ev.Loss | None: str | None}
"""What JSON has for a type."""


def _plain_fields(kind: type[ev.Event]) -> dict[str, Any]:
    return {name: _PLAIN.get(hint, hint) for name, hint in get_type_hints(kind).items() if name != "agent"}


class ElasticState(HubLogic):
    """See the module's description. Pure."""

    KINDS: ClassVar[Kinds] = {
        "hello": {"attempt": int, "host": str, "task": int},
        "alive": {},
        **{name: _plain_fields(kind) for name, kind in _TOLD.items()},
        "value": {"worker": int, "place": int, "part": int, "parts": int},
        "gone": {"why": str},
    }
    FAREWELL: ClassVar[Message] = {"type": "end", "again": False}

    def __init__(self, limits: ev.Limits) -> None:
        self.membership = Membership(limits)
        self.notes: deque[str] = deque()
        """What is to be logged."""
        self.labels: dict[int, int] = {}
        """The rank to show before an agent's output."""
        self._liveness = LivenessTracker()
        # What came while the driver was suspended has yet to be read when it wakes up: nobody's time is over by that.
        self._clock = AwakeClock()
        self._present: set[int] = set()  # agents that have not said goodbye
        self._given_up: set[int] = set()
        self._tasks: dict[int, int] = {}  # of each agent
        self._parts: dict[int, list[bytes]] = {}
        self.values: dict[int, Packed] = {}
        """What workers have returned, where agents were asked to hand it over."""

    def handle(self, message: Message, now: float) -> list[Send]:
        agent, kind = message["rank"], message["type"]
        self.record_heartbeat(agent, now)
        if kind == "hello":
            self._liveness.record_heartbeat(agent, now)
            self._present.add(agent)
            self._tasks[agent] = message["task"]
            return self._told(ev.AgentUp(agent, message["host"], message["task"]), now)
        if kind == "gone":
            self._present.discard(agent)
            self._liveness.forget(agent)
            if self.membership.verdict is None and agent in self.membership.roster.agents:  # else it was given up
                return self._told(ev.AgentLost(agent, message["why"]), now)
            return []
        if kind == "value":
            return [Send(agent, {"type": "kept"})] if self._keep(message) else []
        if agent not in self.membership.roster.agents:
            # Was it given up, and comes back? What it has been part of goes on without it.
            return [Send(agent, {"type": "end", "again": True})] if agent in self._given_up else []
        return [] if kind == "alive" else self._told(_event(message), now)

    def record_heartbeat(self, rank: int, now: float) -> None:
        if rank in self._liveness:
            self._liveness.record_heartbeat(rank, now)

    def tick(self, now: float) -> list[Send]:
        self._liveness.tick(now)
        patience = _SUSPECT_AFTER if self.membership.waits_for_the_silent else SILENT_AFTER
        sends = []
        for agent, seconds in self._liveness.expired(patience, now).items():
            self._liveness.forget(agent)
            sends += self.lost(agent, f"is not heard of any more (last {seconds:.1f} s ago)", now)
        return sends + self._act(self.membership.tick(self._clock.at(now)))

    def stop(self, reason: str) -> list[Send]:
        return self._act(self.membership.stop(reason))

    def lost(self, agent: int, why: str, now: float) -> list[Send]:
        """Give an agent up."""
        self._present.discard(agent)
        self._given_up.add(agent)
        return self._told(ev.AgentLost(agent, why), now)

    def leaving(self, agent: int, why: str, now: float) -> list[Send]:
        """Note that an agent's executor will go."""
        return self._told(ev.AgentLeaving(agent, why), now)

    def tell(self, message: Message, rank: int | None = None) -> list[Send]:
        # A worker that prepares may not listen yet: the signal of a closer look would end it.
        there = sorted((self._present & self.labels.keys()) - self.membership.roster.preparing())
        return [Send(agent, message) for agent in there if rank in (None, self.labels[agent])]

    @property
    def senders(self) -> range:
        """The numbers that agents can have: those of Spark's task attempts, and of further agents of a task."""
        return range(1 << 63)

    @property
    def most_ranks(self) -> int:
        return self.membership.limits.max_num_proc

    @property
    def all_gone(self) -> bool:
        return not self._present

    @property
    def handed_over(self) -> bool:
        """Whether all values of a run that has ended well are here, so that Spark's job need not be waited for."""
        verdict = self.membership.verdict
        return verdict is not None and verdict.end is ev.End.DONE and self.values.keys() >= set(verdict.ranks)

    @property
    def _job_will_hang(self) -> bool:
        """Whether a task has nobody whom we could end: Spark may wait for its host for minutes, or for another slot."""
        return {self._tasks[agent] for agent in self._present} != set(self._tasks.values())

    def _keep(self, message: Message) -> bool:
        """Take a part of a value; returns whether that is all of it."""
        worker, parts = message["worker"], self._parts.setdefault(message["worker"], [])
        parts.append(message["payload"])
        if len(parts) < message["parts"]:
            return False
        self.values[worker] = Packed(message["place"], True, b"".join(self._parts.pop(worker)))
        return True

    def _told(self, event: ev.Event, now: float) -> list[Send]:
        return self._act(self.membership.handle(event, self._clock.at(now)))

    def _act(self, decisions: Iterable[ev.Decision]) -> list[Send]:
        sends = []
        for decision in decisions:
            match decision:
                case ev.Note(text):
                    self.notes.append(text)
                case ev.StartWorker(agent, _, place) | ev.Assign(agent, _, _, place):
                    self.labels[agent] = place.rank
                    sends.append(Send(agent, _message(decision)))
                case ev.EndAgent(agent) if self._job_will_hang:
                    sends.append(Send(agent, {**_message(decision), "report": True}))
                case _:
                    sends.append(Send(decision.agent, _message(decision)))
        return sends


def _message(decision: ev.Decision) -> Message:
    return {"type": ev.name_of(type(decision)), **asdict(decision)}


def _event(message: Message) -> ev.Event:
    kind = _TOLD[message["type"]]
    told = {"agent": message["rank"], **message}
    if told.get("store") is not None:
        told["store"] = tuple(told["store"])
    if told.get("loss") is not None:
        told["loss"] = ev.Loss(told["loss"])
    return kind(**{field.name: told[field.name] for field in fields(kind)})


def labelled(listener: Listener, labels: Mapping[int, int]) -> Listener:
    """Passes on what agents say, with the rank of each agent's worker instead of its number."""
    return lambda agent, said: listener(labels.get(agent, -1), said)


class ElasticHub(HubServer):
    """Runs an :class:`ElasticState` behind a socket, in a thread of its own."""

    _state: ElasticState

    def __init__(
        self,
        limits: ev.Limits,
        bind_host: str,
        public_host: str | None,
        listener: Listener,
        ports: PortRange | None = None,
    ) -> None:
        state = ElasticState(limits)
        super().__init__(state, bind_host, public_host, labelled(listener, state.labels), ports)

    @property
    def verdict(self) -> ev.Verdict | None:
        """How the run has ended; None while it goes on."""
        return self._state.membership.verdict

    @property
    def resets(self) -> int:
        """Generations that have failed."""
        return self._state.membership.policy.resets

    @property
    def handed_over(self) -> bool:
        """Whether all values of the run are here, without Spark's job."""
        with self._lock:
            return self._state.handed_over

    @property
    def values(self) -> dict[int, Packed]:
        """What agents have handed over, by worker."""
        with self._lock:
            return dict(self._state.values)

    def take_notes(self) -> list[str]:
        """What is to be logged, once."""
        with self._lock:
            notes = list(self._state.notes)
            self._state.notes.clear()
        return notes

    def tasks(self) -> dict[int, int]:
        """The agent of each Spark task, of those alive."""
        with self._lock:
            return {agent.task: agent.number for agent in self._state.membership.roster.agents.values()}

    def leaving(self, agents: Iterable[int], why: str) -> None:
        """Executors of these agents will go."""
        self._ask(lambda: self._each(agents, lambda agent, now: self._state.leaving(agent, why, now)))

    def lost(self, agents: Iterable[int], why: str) -> None:
        """Executors of these agents have gone."""
        self._ask(lambda: self._each(agents, lambda agent, now: self._state.lost(agent, why, now)))

    def _each(self, agents: Iterable[int], act: Callable[[int, float], list[Send]]) -> list[Any]:
        now = time.monotonic()
        return [send for agent in agents for send in act(agent, now)]
