"""What membership remembers of agents, workers and the present generation."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from spark_hvd.runner.elastic.membership.events import Loss


class Stage(Enum):
    """How far a worker is.

    ========= ================================== =========
    from      by                                 to
    ========= ================================== =========
    PREPARING Entered                            WAITING
    WAITING   a generation is formed with it     MEMBER
    MEMBER    Finished                           FINISHED
    MEMBER    Entered: its generation is over    WAITING
    FINISHED  Entered: the others' has failed    WAITING
    any alive Ended without a loss               RETURNED
    any alive Ended with one, or its agent lost  GONE
    WAITING   Dismiss: it is not wanted          GONE
    ========= ================================== =========

    RETURNED and GONE are final.
    """

    PREPARING = "preparing"  # fn has not come to its elastic function yet
    WAITING = "waiting"  # asks for a generation
    MEMBER = "member"
    FINISHED = "finished"  # its elastic function has returned; waits for the others'
    RETURNED = "returned"  # fn has returned
    GONE = "gone"


@dataclass(slots=True)
class Worker:
    """One rank process.

    Attributes:
        number: Unique in the run; later ones have higher numbers.
        agent: Of its agent.
        host: Its host.
        task: Its agent's Spark task.
        stage: How far it is.
        rank: In the last generation that it was a member of; None before the first.
        commits: Behind its state; -1 while it has none.
        loss: How it was lost.
        raised: Whether it was lost by an exception of fn.
        functions: Elastic functions that have returned on it and on the others of its world.
    """

    number: int
    agent: int
    host: str
    task: int
    stage: Stage = Stage.PREPARING
    rank: int | None = None
    commits: int = -1
    loss: Loss | None = None
    raised: bool = False
    functions: int = 0

    @property
    def alive(self) -> bool:
        """Whether it may still take part."""
        return self.stage not in (Stage.RETURNED, Stage.GONE)

    @property
    def seniority(self) -> tuple[bool, int, int]:
        """Sorts workers into ranks: those that have the state first, in their former order, then as they came."""
        return self.commits < 0, 1 << 30 if self.rank is None else self.rank, self.number


@dataclass(slots=True)
class AgentRecord:
    """One attempt of a Spark task.

    Attributes:
        number: Its number.
        host: Its host.
        task: Index of the Spark task.
        slot: A number that no other living agent of its host has.
        worker: The process that it has, or has yet to see the end of; None for none.
        leaving: Why its executor goes soon; None if it stays.
        failures: Workers of it that failed, since one took part in a commit.
        not_before: The moment from which it may have another worker.
    """

    number: int
    host: str
    task: int
    slot: int
    worker: int | None = None
    leaving: str | None = None
    failures: int = 0
    not_before: float = 0.0


@dataclass(slots=True)
class GenerationRecord:
    """One world.

    Attributes:
        number: Counts generations from 0.
        members: Numbers of the workers, in rank order.
        commits: The highest number of commits before it.
        deadline: By when it has to have met, or, once it is over, all have to be back; None while it trains.
        store: Where its key-value store listens.
        ready: Members that know their place.
        joined: Members that have met all others.
        over: Why it is over; None while it is not.
        failed: Whether it ended by a failure.
        blamed: Hosts where members have failed.
        culprit: The member whose loss that was, which then is what `over` says; None if none was lost.
        updating: Whether members were told that they change at the next commit.
        finished: Whether the elastic function has returned on all.
    """

    number: int
    members: tuple[int, ...]
    commits: int
    deadline: float | None
    store: tuple[str, int] | None = None
    ready: set[int] = field(default_factory=set)
    joined: set[int] = field(default_factory=set)
    over: str | None = None
    failed: bool = False
    blamed: set[str] = field(default_factory=set)
    culprit: int | None = None
    updating: bool = False
    finished: bool = False

    @property
    def met(self) -> bool:
        """Whether all have met, though it may be over."""
        return len(self.joined) == len(self.members)

    @property
    def trains(self) -> bool:
        """Whether all have met, and it is not over."""
        return self.over is None and not self.finished and self.met
