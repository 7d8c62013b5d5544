"""The hub of an elastic run turns agents' messages into membership events, and decisions into messages to agents.

Here, a message's ``rank`` is the number of an agent. The rank of its worker changes from generation to generation.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, fields
from typing import Any, ClassVar, get_args, get_type_hints

from spark_hvd.runner.channel.hub import HubServer, Listener
from spark_hvd.runner.channel.liveness import SILENT_AFTER, AwakeClock, LivenessTracker
from spark_hvd.runner.channel.state import HubLogic, Kinds, Message, Send
from spark_hvd.runner.elastic.membership import events as ev
from spark_hvd.runner.elastic.membership.records import Stage
from spark_hvd.runner.elastic.membership.state import Membership
from spark_hvd.runner.elastic.membership.texts import brief
from spark_hvd.runner.outcome.rows import Failed, FailureKind, PickledOutcome
from spark_hvd.world.ports import PortRange

_SUSPECT_AFTER = 4.0
"""Seconds of silence after which an agent is given up if the others, whose collectives have failed, wait for it."""


_EVENTS: dict[str, type[ev.Event]] = {
    ev.name_of(kind): kind for kind in get_args(ev.Event) if kind not in (ev.AgentUp, ev.AgentLost)
}
"""The events that agents send, by message type."""
_JSON_TYPES: dict[Any, Any] = {tuple[str, int] | None: list | None, ev.Loss | None: str | None}
"""The types that stand for others in JSON."""


def _json_fields(kind: type[ev.Event]) -> dict[str, Any]:
    return {name: _JSON_TYPES.get(hint, hint) for name, hint in get_type_hints(kind).items() if name != "agent"}


class ElasticState(HubLogic):
    """See the module's description. Pure."""

    KINDS: ClassVar[Kinds] = {
        "hello": {"attempt": int, "host": str, "task": int},
        "alive": {},
        **{name: _json_fields(kind) for name, kind in _EVENTS.items()},
        "value": {"worker": int, "place": int, "ok": bool, "part": int, "parts": int},
        "gone": {"why": str},
    }
    FAREWELL: ClassVar[Message] = {"type": "end", "again": False, "report": ""}

    def __init__(self, limits: ev.Limits) -> None:
        self.membership = Membership(limits)
        self.notes: deque[str] = deque()
        """Texts to log."""
        self.labels: dict[int, int] = {}
        """The rank that prefixes the output of each agent."""
        self._liveness = LivenessTracker()
        # When a suspended driver wakes up, it has yet to read messages that arrived meanwhile: no deadline may pass.
        self._clock = AwakeClock()
        self._present: set[int] = set()  # agents that have not said goodbye
        self._given_up: set[int] = set()
        self._tasks: dict[int, int] = {}  # by agent
        self._parts: dict[int, list[bytes]] = {}
        self.outcomes: dict[int, PickledOutcome] = {}
        """Values and failures, by worker, that agents have handed over to the hub."""

    def handle(self, message: Message, now: float) -> list[Send]:
        agent, kind = message["rank"], message["type"]
        self.record_heartbeat(agent, now)
        if kind == "hello":
            self._liveness.record_heartbeat(agent, now)
            self._present.add(agent)
            self._tasks[agent] = message["task"]
            return self._apply(ev.AgentUp(agent, message["host"], message["task"]), now)
        if kind == "gone":
            self._present.discard(agent)
            self._liveness.forget(agent)
            if self.membership.verdict is None and agent in self.membership.roster.agents:  # not given up before
                return self._apply(ev.AgentLost(agent, message["why"]), now)
            return []
        if kind == "value":
            return [Send(agent, {"type": "kept"})] if self._keep(message) else []
        if agent not in self.membership.roster.agents:
            # An agent that was given up and comes back is too late: the run has continued without it.
            return (
                [Send(agent, {"type": "end", "again": True, "report": "failures"})] if agent in self._given_up else []
            )
        return [] if kind == "alive" else self._apply(_event(message), now)

    def record_heartbeat(self, rank: int, now: float) -> None:
        if rank in self._liveness:
            self._liveness.record_heartbeat(rank, now)

    def tick(self, now: float) -> list[Send]:
        self._liveness.tick(now)
        patience = _SUSPECT_AFTER if self.membership.waits_for_the_silent else SILENT_AFTER
        sends = []
        for agent, seconds in self._liveness.expired(patience, now).items():
            self._liveness.forget(agent)
            sends += self.lost(agent, f"has not been heard from for {seconds:.1f} s", now)
        return sends + self._act(self.membership.tick(self._clock.at(now)))

    def stop(self, reason: str) -> list[Send]:
        return self._act(self.membership.stop(reason))

    def lost(self, agent: int, why: str, now: float) -> list[Send]:
        """Give an agent up."""
        self._present.discard(agent)
        self._given_up.add(agent)
        return self._apply(ev.AgentLost(agent, why), now)

    def leaving(self, agent: int, why: str, now: float) -> list[Send]:
        """Note that an agent's executor will leave."""
        return self._apply(ev.AgentLeaving(agent, why), now)

    def tell(self, message: Message, rank: int | None = None) -> list[Send]:
        # A worker that is still preparing may have no handler yet: the signal that asks for its stacks would kill it.
        listening = sorted((self._present & self.labels.keys()) - self.membership.roster.preparing())
        return [Send(agent, message) for agent in listening if rank in (None, self.labels[agent])]

    @property
    def senders(self) -> range:
        """The numbers that agents can have: Spark's task attempts, and further agents of the same task."""
        return range(1 << 63)

    @property
    def most_ranks(self) -> int:
        return self.membership.limits.max_num_proc

    @property
    def all_gone(self) -> bool:
        return not self._present

    @property
    def handed_over(self) -> bool:
        """Whether the run has succeeded and all its values are here, so that nobody needs to wait for Spark's job."""
        verdict = self.membership.verdict
        return verdict is not None and verdict.end is ev.End.DONE and self.outcomes.keys() >= set(verdict.ranks)

    @property
    def _job_will_hang(self) -> bool:
        """Whether a task has no agent left to end: Spark may wait minutes for its host, or for another slot."""
        return {self._tasks[agent] for agent in self._present} != set(self._tasks.values())

    @property
    def _wanted(self) -> str:
        """What an agent that ends should hand over to the hub, besides values that are too large for Spark."""
        verdict = self.membership.verdict
        if verdict is None or verdict.end is not ev.End.DONE:
            return "failures"
        return "values" if self._job_will_hang else ""

    def _keep(self, message: Message) -> bool:
        """Keep a part of an outcome, and return whether the outcome is complete."""
        worker, parts = message["worker"], self._parts.setdefault(message["worker"], [])
        parts.append(message["payload"])
        if len(parts) < message["parts"]:
            return False
        self.outcomes[worker] = PickledOutcome(message["place"], message["ok"], b"".join(self._parts.pop(worker)))
        return True

    @property
    def culprit(self) -> Failed | None:
        """A failure made of the verdict, for a worker that ended the run and has none: it had returned, or was lost."""
        verdict, roster = self.membership.verdict, self.membership.roster
        if verdict is None or verdict.culprit is None:
            return None
        worker = roster.workers[verdict.culprit]
        rank = self.labels[worker.agent] if worker.rank is None else worker.rank
        kind = FailureKind.RESULT if worker.stage is Stage.RETURNED else FailureKind.LOST
        return Failed(rank, worker.host, kind, brief(verdict.text))

    def _apply(self, event: ev.Event, now: float) -> list[Send]:
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
                case ev.EndAgent(agent):
                    sends.append(Send(agent, {**_message(decision), "report": self._wanted}))
                case _:
                    sends.append(Send(decision.agent, _message(decision)))
        return sends


def _message(decision: ev.Decision) -> Message:
    return {"type": ev.name_of(type(decision)), **asdict(decision)}


def _event(message: Message) -> ev.Event:
    kind = _EVENTS[message["type"]]
    values = {"agent": message["rank"], **message}
    if values.get("store") is not None:
        values["store"] = tuple(values["store"])
    if values.get("loss") is not None:
        values["loss"] = ev.Loss(values["loss"])
    return kind(**{field.name: values[field.name] for field in fields(kind)})


def labelled(listener: Listener, labels: Mapping[int, int]) -> Listener:
    """Wrap a listener so that it gets the rank of each agent's worker instead of the agent's number."""
    return lambda agent, message: listener(labels.get(agent, -1), message)


class ElasticHub(HubServer):
    """Runs an :class:`ElasticState` behind a socket, in a separate thread."""

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
        """How the run has ended; None until it has."""
        return self._state.membership.verdict

    @property
    def resets(self) -> int:
        """The number of generations that have failed."""
        return self._state.membership.policy.resets

    @property
    def handed_over(self) -> bool:
        """Whether the run has succeeded and the hub has all its values."""
        with self._lock:
            return self._state.handed_over

    @property
    def culprit(self) -> Failed | None:
        """See :attr:`ElasticState.culprit`."""
        with self._lock:
            return self._state.culprit

    @property
    def outcomes(self) -> dict[int, PickledOutcome]:
        """The values and failures that agents have handed over, by worker."""
        with self._lock:
            return dict(self._state.outcomes)

    def take_notes(self) -> list[str]:
        """Return the texts to log, and forget them."""
        with self._lock:
            notes = list(self._state.notes)
            self._state.notes.clear()
        return notes

    def tasks(self) -> dict[int, int]:
        """Return the living agent of each Spark task."""
        with self._lock:
            return {agent.task: agent.number for agent in self._state.membership.roster.agents.values()}

    def leaving(self, agents: Iterable[int], why: str) -> None:
        """Note that the executors of these agents will leave."""
        self._ask(lambda: self._each(agents, lambda agent, now: self._state.leaving(agent, why, now)))

    def lost(self, agents: Iterable[int], why: str) -> None:
        """Note that the executors of these agents are gone."""
        self._ask(lambda: self._each(agents, lambda agent, now: self._state.lost(agent, why, now)))

    def _each(self, agents: Iterable[int], act: Callable[[int, float], list[Send]]) -> list[Any]:
        now = time.monotonic()
        return [send for agent in agents for send in act(agent, now)]
