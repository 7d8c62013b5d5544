"""What must hold in every world, whatever goes wrong in it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from spark_hvd.runner.outcome.errors import (
    RankFailedError,
    RunError,
    RunTimeoutError,
    StartTimeoutError,
    StateLostError,
    TooFewRanksError,
)
from spark_hvd.runner.outcome.rows import FailureKind
from spark_hvd.world.vitals import Vitals
from tests.world.plan import Fault

if TYPE_CHECKING:
    from tests.world.ranks import RankProcess
    from tests.world.world import SimulatedWorld

_LONG_ENOUGH = 15.0
"""Seconds in which late ranks take part if nothing goes wrong."""
_NOTICES = {"notice", "notice to rank", "decommission"}
_BRIEF = {
    "cut": 4.0,
    "cut up": 4.0,
    "cut down": 4.0,
    "freeze host": 2.5,
    "freeze driver": 20.0,
    "stop": 2.0,
    "slow": 99.0,
}
"""Seconds of a disturbance that is survived without a failure."""
_ONE_FAILURE = {"kill", "raise", "lose task", "lose host", "fork server"}
_GONE = r"not been heard from|lost its executor|restarted its task|did not answer|left it|could not meet|"
_GONE += (
    r"join the others|come back|cannot be reached|lost the executor|ended without notice|will leave|had not handed over"
)
_NEWCOMER = "elastic function number"
_NAMED = {
    "kill": "SIGKILL",
    "raise": "the loss is nan",
    "all raise": "the loss is nan",
    "fork server": "fork server",
    "bad host": "code 1|SIGKILL",
    "poison": "SIGKILL",
    "returns": "without having called|SIGKILL",
    "hang": rf"timeout=|waited|Timed out|{_GONE}",
    "stop": rf"SIGSTOP|waited|Timed out|{_GONE}",
    "slow": _GONE,
}
"""What an error says, by kind of fault. Others are faults of hosts and wires."""


def is_harmless(fault: Fault) -> bool:
    """Return whether a run continues without a failure."""
    return fault.kind in ("new host", "clock", *_NOTICES) or (
        fault.seconds is not None and fault.seconds <= _BRIEF.get(fault.kind, 0.0)
    )


class Checks:
    """See the module's description; each failure raises an AssertionError where it happens."""

    def __init__(self, world: SimulatedWorld) -> None:
        self._world = world
        self._harmful = [fault for fault in world.plan.faults if not is_harmless(fault)]
        self._worlds: dict[int, dict[int, RankProcess]] = {}
        self._steps: dict[int, tuple[int, int]] = {}
        """For each generation: the first step that was made in it, and the last."""
        self._printed = self._vitals = 0
        self.behind = False
        """Whether a world began with ranks that reported no commit, although one had been reported."""
        self._generations: list[Any] = []
        """The product's records."""

    def joined(self, process: RankProcess, generation: int, rank: int, members: list[RankProcess]) -> None:
        """Check that a rank has joined a world."""
        seats = self._worlds.setdefault(generation, dict(enumerate(members)))
        assert seats == dict(enumerate(members)), f"two worlds of generation {generation}: {seats} and {members}"
        assert seats[rank] is process
        limits = self._world.plan.limits
        assert limits.min_num_proc <= len(members) <= limits.max_num_proc
        self._world.log("{} is rank {} of generation {}", process, rank, generation)

    def stepped(self, process: RankProcess, generation: int, told: list[Any]) -> None:
        """Check a step of the ranks: the position of each, in rank order."""
        assert all(theirs[:3] == told[0][:3] for theirs in told), f"weights, steps or epochs differ: {told}"
        step = told[0][1]
        if generation in self._steps:
            self._steps[generation] = self._steps[generation][0], max(step, self._steps[generation][1])
            return
        self._steps[generation] = step, step
        before = max((number for number in self._steps if number < generation), default=None)
        if before is None:
            assert step == 0
            return
        last = self._steps[before][1] + 1
        if set(self._worlds[before].values()) & set(self._worlds[generation].values()):
            lost = 0 if not self._harmful else self._world.plan.commit_every
            assert last - lost <= step <= last, f"generation {generation} begins at step {step}, after {last} steps"

    def printed(self, label: int, text: str) -> None:
        """Check a rank's output that has arrived at the driver."""
        self._printed += 1
        number, generation, rank = map(int, text.split())
        present = self._world.driver.membership.generation
        if present.number == generation and number in present.members:
            assert label == rank, f"what rank {rank} prints is shown as rank {label}'s"

    def lives(self, record: Vitals) -> None:
        """Check a rank's vitals that have arrived at the driver."""
        self._vitals += 1
        assert record.rank < len(self._worlds[record.generation]) == record.size

    def decided(self, membership: Any) -> None:
        """Check the hub's turn."""
        present, before = membership.generation, self._generations[-1] if self._generations else None
        if present is before:
            return
        self._generations.append(present)
        workers = membership.roster.workers
        commits = [workers[number].commits for number in present.members]
        self.behind |= max(commits) == 0 < membership.policy.commits
        with_state = [each >= 0 for each in commits]
        assert with_state == sorted(with_state, reverse=True), "a rank without the state is before one that has it"
        if before is not None:
            assert present.number == before.number + 1
            assert all(workers[number].stage.name != "MEMBER" or number in present.members for number in before.members)
            stay = [number for number in before.members if number in present.members and workers[number].commits >= 0]
            assert stay == [number for number in present.members if number in stay], "survivors change their order"

    @property
    def _least(self) -> int:
        """The number of ranks without which a run cannot succeed: all of the first, if none takes over from another."""
        plan = self._world.plan
        first = [process.spec.me.size for process in self._world.processes if process.spec.stream == 0]
        return plan.limits.min_num_proc if plan.elastic or not first else first[0]

    # ---- at the end -----------------------------------------------------------------------------------------------

    def at_end(self) -> None:
        """Check a run that has ended, or should have."""
        world, driver = self._world, self._world.driver
        if not driver.dead:
            assert driver.ended_at is not None, f"neither a result nor an error after {world.seconds:.0f} s"
            noted = driver.membership.noted
            assert world.noted == noted[: len(world.noted)], "what is to be read in the log is there once"
            if driver.error is None:
                assert len(world.noted) == len(noted)
                self._result(driver.values or [])
            else:
                self._error(driver.error)
            self._failures(driver.membership.policy.resets)
        left = [process for process in world.processes if process.alive]
        assert not left, f"left behind: {left}"
        agents = [attempt for attempt in world.spark.attempts_made if attempt.alive]
        assert not agents, f"left behind: {agents}"

    def _result(self, values: list[Any]) -> None:
        assert values
        if not self._world.plan.elastic:
            assert values == [None] * len(values)
            assert len(values) >= self._least, "a rank was lost, and its value is missing"
            return
        assert min(self._printed, self._vitals) >= len(values), "what ranks tell is not shown"
        assert all(value == values[0] for value in values), "values differ between ranks"
        seen = [tuple(map(int, each.split(":"))) for each in values[0][2].split()]  # epoch and row
        plan = self._world.plan
        assert len(set(seen)) == len(seen), f"a row twice: {sorted(row for row in set(seen) if seen.count(row) > 1)}"
        for epoch in range(plan.epochs):
            missing = set(range(plan.rows)) - {row for at, row in seen if at == epoch}
            # If ranks change and an epoch has fewer rows left than ranks, these are dropped: docs/elastic.md.
            most = 0 if len(self._worlds) == 1 else max(map(len, self._worlds.values())) - 1
            assert len(missing) <= most, f"epoch {epoch}: rows {sorted(missing)} are missing"
        quiet = all(fault.kind == "new host" for fault in plan.faults)
        apart = any("takes no part" in text for text in self._world.noted)
        assert plan.again or not apart
        if quiet and not apart and self._world.seconds > max(plan.starts) + _LONG_ENOUGH:
            assert len(values) == plan.limits.max_num_proc, "a rank that has come late takes no part"

    def _failures(self, resets: int) -> None:
        """Return how many the product counts."""
        if _NEWCOMER in str(self._world.driver.error):
            return
        if not self._harmful:
            assert resets == 0, f"{resets} failures, and there was none"
        elif len(self._harmful) == 1 and self._harmful[0].kind in _ONE_FAILURE:
            assert resets <= 1, f"{resets} failures after one"

    def _error(self, error: BaseException) -> None:
        world, plan, text = self._world, self._world.plan, str(self._world.driver.error)
        kinds = [fault.kind for fault in plan.faults]
        if isinstance(error, KeyboardInterrupt):
            assert "interrupt" in kinds
            assert world.driver.membership.verdict is not None
            return
        assert isinstance(error, RunError), repr(error)
        if isinstance(error, RankFailedError):
            assert error.failures, f"no rank is named: {text}"
            raised = "fn raised an exception on every rank" in text
            assert not raised or error.first.kind is FailureKind.EXCEPTION, f"the exception is missing: {text}"
        assert "the hub of this run failed" not in text, text
        if _NEWCOMER in text:  # new ranks begin with the first one
            assert plan.again
            assert plan.limits.min_num_proc > 1
            assert self._harmful or _NOTICES.intersection(kinds), "the others would have gone on without them"
            return
        if isinstance(error, RunTimeoutError):
            # A rank that hangs alone is not noticed; others learn of it when their collectives take too long.
            # For a task that has ended, it is unknown whether Spark finds a slot to repeat it, and its value.
            alone = "hang" in kinds and len(self._generations[-1].members) == 1
            lost = "had not handed over" in text and any(fault.seconds is None for fault in self._harmful)
            assert alone or lost, "it would have gone on forever"
        if "before anything was committed" in text:
            policy = world.driver.membership.policy
            assert policy.commits <= max(self._generations[-3].commits, 0), "there was progress in between"
        named = [_NAMED.get(fault.kind, _GONE) for fault in plan.faults]
        short = "min_num_proc=" in text  # of executors: those that were lost, or left by notice
        assert short or any(re.search(each, text) for each in named), f"the error names no cause: {text}"
        if len(self._harmful) > 1 or not {fault.kind for fault in self._harmful} <= _ONE_FAILURE:
            return
        # At most one failure: it is survived, unless too few ranks are left, or all with the state are gone.
        gone = {host.name for host in world.hosts.values() if host.leaving} | world.network.down
        slots = sum(host.slots for host in world.hosts.values() if host.name not in gone)
        alone = any(len({process.host for process in seats.values()}) == 1 for seats in self._worlds.values())
        fatal = plan.limits.reset_limit == 0 or slots < self._least or (alone and self._harmful)
        over = self._harmful and ("after the elastic function had returned" in text or "had returned from fn" in text)
        late = (
            isinstance(error, StartTimeoutError | TooFewRanksError) and "lose host" in kinds
        )  # Spark had not noticed it yet
        left = isinstance(error, StateLostError) and any(kind in _NOTICES for kind in kinds)
        assert fatal or over or late or left, f"one failure is survived: {text}"
