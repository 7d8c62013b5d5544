"""The product's membership, each of whose decisions is compared with the reference's."""

from __future__ import annotations

import random
from dataclasses import replace

from spark_hvd.runner.elastic.membership import events as ev
from spark_hvd.runner.elastic.membership.state import Membership
from tests.world.members import Members, Told


class Watched(Membership):
    """See the module's description; `noted` is what the log must contain."""

    def __init__(self, limits: ev.Limits, chance: random.Random) -> None:
        super().__init__(limits, chance)
        self._reference = Members(limits)
        self._inner = False
        self._compared: float | None = None
        """The moment at which nothing was left to decide."""
        self._gone: set[int] = set()
        self.noted: list[str] = []

    def handle(self, event: ev.Event, now: float) -> list[ev.Decision]:
        if isinstance(event, ev.AgentLost) and "Spark" not in event.why:
            assert event.agent not in self._gone, f"agent {event.agent} is lost twice"
            self._gone.add(event.agent)
        self._inner = True
        told = super().handle(event, now)
        self._inner = False
        self._compared = None if isinstance(event, ev.Committed) else now
        return self._checked(told, self._reference.handle(event, now, told))

    def tick(self, now: float) -> list[ev.Decision]:
        told = super().tick(now)
        if self._inner or (not told and now == self._compared):
            return told
        self._compared = now
        return self._checked(told, self._reference.tick(now, told))

    def stop(self, text: str) -> list[ev.Decision]:
        return self._checked(super().stop(text), self._reference.stop())

    def _checked(self, told: list[ev.Decision], expected: list[Told]) -> list[ev.Decision]:
        self.noted += [each.text for each in told if isinstance(each, ev.Note)]
        assert len(told) == len(expected), (told, expected)
        for decision in told:
            match = next((each for each in expected if _alike(decision, each)), None)
            assert match is not None, (decision, expected)
            expected.remove(match)
        verdict, reference = self.verdict, self._reference
        if verdict is None or reference.verdict is None:
            assert verdict == reference.verdict, (verdict, reference.verdict)
        else:
            end, text, culprit, ranks = reference.verdict
            assert (verdict.end, verdict.culprit, verdict.ranks) == (end, culprit, ranks), (verdict, reference.verdict)
            assert text in verdict.text
        assert self.policy.resets == reference.resets
        return told


def _alike(decision: ev.Decision, expected: Told) -> bool:
    if isinstance(decision, ev.Note):
        return isinstance(expected, str) and expected in decision.text
    if isinstance(decision, ev.Reset) and isinstance(expected, ev.Reset):
        return decision.why != "" and replace(decision, why="") == expected
    if isinstance(decision, ev.StopWorker) and isinstance(expected, ev.StopWorker):
        return expected.why in decision.why and replace(decision, why="") == replace(expected, why="")
    return decision == expected
