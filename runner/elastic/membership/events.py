"""The events and decisions of elastic membership, as plain data, so that a test's scenario is a list of lines."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from spark_hvd.world.layout import RankInfo

# An agent is one attempt of a Spark task; it supervises one worker at a time. A worker is one rank process.


class Loss(Enum):
    """Why a worker has ended without a value."""

    FAILED = "failed"  # fn raised, or the process exited or crashed: the program or the host may be at fault
    LOST = "lost"  # its agent fell silent, or Spark restarted the task: the executor is gone
    HUNG = "hung"  # it did not return from a generation that was over, or a signal stopped it


# ---- events -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AgentUp:
    """An agent has said hello."""

    agent: int
    host: str
    task: int


@dataclass(frozen=True, slots=True)
class AgentLost:
    """An agent is no longer heard from."""

    agent: int
    why: str


@dataclass(frozen=True, slots=True)
class AgentLeaving:
    """An agent's executor has announced that it will leave soon, which is no failure."""

    agent: int
    why: str


@dataclass(frozen=True, slots=True)
class Entered:
    """A worker has left its world, if it had one, and asks for its next generation."""

    worker: int


@dataclass(frozen=True, slots=True)
class _InGeneration:
    worker: int
    generation: int


@dataclass(frozen=True, slots=True)
class Ready(_InGeneration):
    """A worker knows its place in a generation. Rank 0 also gives the address of its key-value store."""

    store: tuple[str, int] | None = None


@dataclass(frozen=True, slots=True)
class Joined(_InGeneration):
    """A worker has connected to all others of a generation."""


@dataclass(frozen=True, slots=True)
class Broken(_InGeneration):
    """A worker's collectives have failed in this generation."""

    error: str


@dataclass(frozen=True, slots=True)
class Yielded(_InGeneration):
    """A worker has left a generation at a commit, because an update was wanted."""


@dataclass(frozen=True, slots=True)
class Committed:
    """A worker's state includes this many commits."""

    worker: int
    commits: int


@dataclass(frozen=True, slots=True)
class Finished(_InGeneration):
    """The elastic function has returned on a worker in this generation."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A worker's process has ended.

    Attributes:
        worker: Its number.
        loss: Why there is no value; None if fn returned one.
        error: What happened, in a line.
        raised: Whether fn raised an exception.
    """

    worker: int
    loss: Loss | None = None
    error: str = ""
    raised: bool = False


Event = AgentUp | AgentLost | AgentLeaving | Entered | Ready | Joined | Broken | Yielded | Committed | Finished | Ended


# ---- decisions --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _ToWorker:
    agent: int
    worker: int


@dataclass(frozen=True, slots=True)
class _ToMember(_ToWorker):
    generation: int


@dataclass(frozen=True, slots=True)
class StartWorker(_ToWorker):
    """Start a worker on an agent.

    ``place`` holds until the worker joins a generation. ``slot`` is the agent's, which no other agent of its host has.
    """

    place: RankInfo
    slot: int


@dataclass(frozen=True, slots=True)
class StopWorker(_ToWorker):
    """End a worker's process at once."""

    why: str


@dataclass(frozen=True, slots=True)
class Dismiss(_ToWorker):
    """Let a worker that asks for a generation exit normally, because it is no longer needed."""


@dataclass(frozen=True, slots=True)
class Assign(_ToMember):
    """Tell a worker its place in a generation."""

    place: RankInfo


@dataclass(frozen=True, slots=True)
class Go(_ToMember):
    """All members know their places, and should meet through this store."""

    store: tuple[str, int]


@dataclass(frozen=True, slots=True)
class Reset(_ToMember):
    """A generation is over; its members should abort their communicators."""

    why: str


@dataclass(frozen=True, slots=True)
class Update(_ToMember):
    """The members of a generation will change at its next commit."""


@dataclass(frozen=True, slots=True)
class Finish(_ToMember):
    """The elastic function has returned on all members."""


@dataclass(frozen=True, slots=True)
class EndAgent:
    """An agent is no longer needed, and should end its worker if it has one.

    With ``again``, Spark should start its task elsewhere.
    """

    agent: int
    again: bool = False


@dataclass(frozen=True, slots=True)
class Note:
    """Something that the user should read in the log."""

    text: str


Decision = StartWorker | StopWorker | Dismiss | Assign | Go | Reset | Update | Finish | EndAgent | Note


def name_of(kind: type) -> str:
    """Return the name of an event or a decision in messages, such as "start" for StartWorker."""
    return kind.__name__.replace("Agent", "").replace("Worker", "").lower()


# ---- rules, and how a run ends ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The rules of a run.

    Attributes:
        num_proc: Ranks wanted for the first generation.
        min_num_proc: Minimum number of ranks that train.
        max_num_proc: Maximum number of ranks that train.
        start_timeout: Seconds to wait for `num_proc` agents before `min_num_proc` are enough.
        elastic_timeout: Seconds to wait later for enough workers, and for workers to reach each other.
        reset_limit: Failures that a run survives; None means any number.
        rejoin_timeout: Seconds for a worker to return from a generation that is over, and to join the next one.
        host_failure_limit: Workers that may fail on a host, without a commit in between, before it is excluded.
        cooldown: Minimum and maximum number of seconds of an exclusion; None means forever.
        no_progress_limit: Generations in a row that fail without a commit until the run ends.
    """

    num_proc: int
    min_num_proc: int
    max_num_proc: int
    start_timeout: float = 600.0
    elastic_timeout: float = 600.0
    reset_limit: int | None = None
    rejoin_timeout: float = 30.0
    host_failure_limit: int = 2
    cooldown: tuple[float, float] | None = None
    no_progress_limit: int = 3


class End(Enum):
    """How a run has ended."""

    DONE = "done"
    STOPPED = "stopped"  # by the caller
    TOO_FEW = "too few"  # fewer than min_num_proc for too long
    NOT_STARTED = "not started"  # too few even to begin
    RESET_LIMIT = "reset limit"
    STATE_LOST = "state lost"  # every worker that had the state is gone
    FAILED = "failed"  # workers failed, and starting others would not help


@dataclass(frozen=True, slots=True)
class Verdict:
    """The end of a run.

    Attributes:
        end: How the run ended.
        text: The message for the user; empty if the run succeeded.
        culprit: The worker whose failure ended the run, if there is one.
        ranks: If the run succeeded, the workers that returned values, in rank order.
    """

    end: End
    text: str = ""
    culprit: int | None = None
    ranks: tuple[int, ...] = field(default=())
