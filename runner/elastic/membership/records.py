"""What membership remembers about agents, workers and the current generation."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from spark_hvd.runner.elastic.membership.events import Loss


class Stage(Enum):
    """How far a worker has come.

    ========= ====================================== =========
    from      on                                     to
    ========= ====================================== =========
    PREPARING Entered                                WAITING
    WAITING   a generation that includes it          MEMBER
    MEMBER    Finished                               FINISHED
    MEMBER    Entered: its generation is over        WAITING
    FINISHED  Entered: its generation has failed     WAITING
    any alive Ended without a loss                   RETURNED
    any alive Ended with a loss, or AgentLost        GONE
    WAITING   Dismiss: it is no longer needed        GONE
    ========= ====================================== =========

    RETURNED and GONE are final.
    """

    PREPARING = "preparing"  # fn has not called its elastic function yet
    WAITING = "waiting"  # it asks for a generation
    MEMBER = "member"
    FINISHED = "finished"  # its elastic function has returned; it waits for the other members
    RETURNED = "returned"  # fn has returned
    GONE = "gone"


@dataclass(slots=True)
class Worker:
    """One rank process.

    Attributes:
        number: Its number, unique in the run; later workers have higher numbers.
        agent: The number of its agent.
        host: Its host.
        task: The Spark task of its agent.
        stage: How far it has come.
        rank: Its rank in the last generation that it was a member of; None before the first.
        commits: The number of commits that its state includes; -1 while it has no state.
        loss: How it was lost.
        raised: Whether it was lost because fn raised an exception.
        functions: The number of elastic functions that have returned on all ranks of its world.
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
        """Whether the worker may still take part."""
        return self.stage not in (Stage.RETURNED, Stage.GONE)

    @property
    def seniority(self) -> tuple[bool, int, int]:
        """Sort key that makes workers ranks: first those with the state, by their last rank, then the others."""
        return self.commits < 0, 1 << 30 if self.rank is None else self.rank, self.number


@dataclass(slots=True)
class AgentRecord:
    """One attempt of a Spark task.

    Attributes:
        number: Its number.
        host: Its host.
        task: Index of the Spark task.
        slot: A number that no other living agent of its host has.
        worker: Its worker, until the end of that process is reported; None for none.
        leaving: Why its executor will leave soon; None if it stays.
        failures: The number of its workers that failed since one took part in a commit.
        not_before: The time from which it may have another worker.
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
        number: Its number, counted from 0.
        members: The numbers of its workers, in rank order.
        commits: The highest number of commits before it.
        deadline: When all members must have connected or, once it is over, have returned; None while it trains.
        store: The address of its key-value store.
        ready: Members that know their place.
        joined: Members that have connected to all others.
        over: Why it is over; None until it is.
        failed: Whether a failure ended it.
        blamed: Hosts on which members have failed.
        culprit: The member whose loss ended it, as `over` says; None if no member was lost.
        updating: Whether its members were told that they will change at the next commit.
        finished: Whether the elastic function has returned on all members.
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
        """Whether all members have connected, even if the generation is over."""
        return len(self.joined) == len(self.members)

    @property
    def trains(self) -> bool:
        """Whether all members have connected and the generation is not over."""
        return self.over is None and not self.finished and self.met
