"""What must hold in every world, whatever goes wrong in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spark_hvd.runner.outcome.errors import RunError, RunTimeoutError

if TYPE_CHECKING:
    from tests.world.ranks import RankProcess
    from tests.world.world import SimulatedWorld


class Checks:
    """See the module's description; each failure is an AssertionError where it happens."""

    def __init__(self, world: SimulatedWorld) -> None:
        self._world = world
        self._worlds: dict[int, dict[int, RankProcess]] = {}
        self.steps = 0

    def joined(self, process: RankProcess, generation: int, rank: int, members: list[RankProcess]) -> None:
        """A rank has joined a world."""
        seats = self._worlds.setdefault(generation, dict(enumerate(members)))
        assert seats == dict(enumerate(members)), f"two worlds of generation {generation}: {seats} and {members}"
        assert seats[rank] is process
        limits = self._world.plan.limits
        assert limits.min_num_proc <= len(members) <= limits.max_num_proc
        self._world.log(f"{process} is rank {rank} of generation {generation}")

    def stepped(self, process: RankProcess, generation: int, told: list[Any]) -> None:
        """Ranks have made a step: what each of them was at, in rank order."""
        self.steps += 1
        first = told[0][:3]
        assert all(theirs[:3] == first for theirs in told), f"weights, steps or epochs differ: {told}"

    def reset(self, process: RankProcess, state: Any) -> None:
        """A state was told of a new world."""

    def decided(self, membership: Any) -> None:
        """The hub has taken its turn."""

    def at_end(self) -> None:
        """The run has ended, or should have."""
        world, plan = self._world, self._world.plan
        driver = world.driver
        if not driver.dead:
            assert driver.ended_at is not None, f"neither a result nor an error after {world.seconds:.0f} s"
            if driver.error is None:
                self._result(driver.values or [])
            else:
                assert isinstance(driver.error, RunError), repr(driver.error)
                hangs = any(fault.kind == "hang" for fault in plan.faults)
                assert hangs or not isinstance(driver.error, RunTimeoutError), "it would have gone on for ever"
        left = [process for process in world.processes if process.alive]
        assert not left, f"left behind: {left}"
        agents = [attempt for attempt in world.spark.attempts_made if attempt.alive]
        assert not agents, f"left behind: {agents}"

    def _result(self, values: list[Any]) -> None:
        assert values
        assert all(value == values[0] for value in values), "values differ between ranks"
        _, _, seen = values[0]
        plan = self._world.plan
        assert len(set(seen)) == len(seen), f"a row twice: {sorted(row for row in set(seen) if seen.count(row) > 1)}"
        for epoch in range(plan.epochs):
            missing = set(range(plan.rows)) - {row for at, row in seen if at == epoch}
            # Where ranks change and fewer rows than ranks are left of an epoch, these are left out: docs/elastic.md.
            most = 0 if len(self._worlds) == 1 else max(map(len, self._worlds.values())) - 1
            assert len(missing) <= most, f"epoch {epoch}: rows {sorted(missing)} are missing"
