"""What elastic membership is told, and what it decides: plain data, so that a scenario is a list of lines."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from spark_hvd.world.layout import RankInfo

# An agent is one attempt of a Spark task; it supervises one worker at a time. A worker is one rank process.


class Loss(Enum):
    """Why a worker has ended without a value."""

    FAILED = "failed"  # fn raised, or the process left or crashed: it may be the fault of program or host
    LOST = "lost"  # nothing is heard of its agent any more, or Spark started the task anew: the executor has gone
    HUNG = "hung"  # it did not come back from a generation that was over, or was stopped


# ---- events -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AgentUp:
    """An agent has said hello."""

    agent: int
    host: str
    task: int


@dataclass(frozen=True, slots=True)
class AgentLost:
    """An agent is not heard of any more."""

    agent: int
    why: str


@dataclass(frozen=True, slots=True)
class AgentLeaving:
    """An agent's executor will go soon, and has said so: no failure."""

    agent: int
    why: str


@dataclass(frozen=True, slots=True)
class Entered:
    """A worker asks for its next generation; it is in no world."""

    worker: int


@dataclass(frozen=True, slots=True)
class _InGeneration:
    worker: int
    generation: int


@dataclass(frozen=True, slots=True)
class Ready(_InGeneration):
    """A worker knows its place in a generation. The first also tells where its key-value store listens."""

    store: tuple[str, int] | None = None


@dataclass(frozen=True, slots=True)
class Joined(_InGeneration):
    """A worker has met all others of a generation."""


@dataclass(frozen=True, slots=True)
class Broken(_InGeneration):
    """A worker's collectives have failed, in this generation."""

    error: str


@dataclass(frozen=True, slots=True)
class Yielded(_InGeneration):
    """A worker has left a generation in order, since an update was wanted."""


@dataclass(frozen=True, slots=True)
class Committed:
    """A worker's state has this many commits behind it."""

    worker: int
    commits: int


@dataclass(frozen=True, slots=True)
class Finished(_InGeneration):
    """The elastic function has returned on a worker, in this generation."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A worker's process has gone.

    Attributes:
        worker: Its number.
        loss: None if fn returned a value.
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

    ``place`` is what it is told until it is in a generation. No other agent of its host has the ``slot``, the same for
    all its workers.
    """

    place: RankInfo
    slot: int


@dataclass(frozen=True, slots=True)
class StopWorker(_ToWorker):
    """End a worker's process at once."""

    why: str


@dataclass(frozen=True, slots=True)
class Dismiss(_ToWorker):
    """Let a worker that asks for a generation leave in order: it is not wanted any more."""


@dataclass(frozen=True, slots=True)
class Assign(_ToMember):
    """Tell a worker its place in a generation."""

    place: RankInfo


@dataclass(frozen=True, slots=True)
class Go(_ToMember):
    """All members know their places: they are to meet in this store."""

    store: tuple[str, int]


@dataclass(frozen=True, slots=True)
class Reset(_ToMember):
    """A generation is over: its communicators are to be aborted."""

    why: str


@dataclass(frozen=True, slots=True)
class Update(_ToMember):
    """The members of a generation are to change at its next commit."""


@dataclass(frozen=True, slots=True)
class Finish(_ToMember):
    """The elastic function has returned on all members."""


@dataclass(frozen=True, slots=True)
class EndAgent:
    """Nothing is left to do for an agent; a worker that it may have is to be ended.

    With ``again``, Spark is to start its task elsewhere.
    """

    agent: int
    again: bool = False


@dataclass(frozen=True, slots=True)
class Note:
    """Something that the user should read in the log."""

    text: str


Decision = StartWorker | StopWorker | Dismiss | Assign | Go | Reset | Update | Finish | EndAgent | Note


def name_of(kind: type) -> str:
    """What messages between driver and agents call an event or a decision: "start" for StartWorker."""
    return kind.__name__.replace("Agent", "").replace("Worker", "").lower()


# ---- what it goes by, and how it ends ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The rules of a run.

    Attributes:
        num_proc: Ranks wanted for the first generation.
        min_num_proc: Fewer never train.
        max_num_proc: More never do.
        start_timeout: Seconds to wait for `num_proc` agents before fewer will do.
        elastic_timeout: Seconds to wait for enough workers, later, and for workers to reach each other.
        reset_limit: Failures that are survived; None for any number.
        rejoin_timeout: Seconds for a worker to come back from a generation that is over, and to join the next one.
        host_failure_limit: Workers that may fail on a host, without a commit in between, until it is excluded.
        cooldown: Least and greatest number of seconds of an exclusion; None for ever.
        no_progress_limit: Generations that may fail in a row before anything was committed.
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
    TOO_FEW = "too few"  # less than min_num_proc, for too long
    NOT_STARTED = "not started"  # the same, before anything had begun
    RESET_LIMIT = "reset limit"
    STATE_LOST = "state lost"  # every worker that had the state has gone
    FAILED = "failed"  # workers failed, and starting others would not help


@dataclass(frozen=True, slots=True)
class Verdict:
    """The end of a run.

    Attributes:
        end: How.
        text: What to tell the user; empty if all went well.
        culprit: The worker whose failure it was, if there is one.
        ranks: The workers that have returned values, in rank order, if all went well.
    """

    end: End
    text: str = ""
    culprit: int | None = None
    ranks: tuple[int, ...] = field(default=())
