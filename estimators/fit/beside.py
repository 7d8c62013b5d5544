"""Validation in the background: the driver starts a run for the newest checkpoint, one such run at a time."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

from spark_hvd.estimators.training.history import History
from spark_hvd.estimators.training.late import BEAT, MeetingPlace, Results, Ticket, generation_of
from spark_hvd.runner.outcome.errors import StartTimeoutError
from spark_hvd.runner.stopping import stopped_by
from spark_hvd.runner.watch.tracking import Facts, Tracker
from spark_hvd.store.errors import StoreError

if TYPE_CHECKING:
    from spark_hvd.runner.watch.summary import Summary
    from spark_hvd.world.vitals import Vitals

_log = logging.getLogger(__name__)
Validated = tuple[Ticket, dict[str, float]]
_EVERY_HERE, _EVERY = 0.1, 1.0
"""Seconds between two checks of the run's folder: on this machine's disks, and elsewhere."""


class Begun(Tracker):
    """A tracker that reports when a run is about to start its ranks, and when the first record arrives."""

    def __init__(self, starts: Callable[[], None], runs: Callable[[], None]) -> None:
        self._starts, self._runs = starts, runs

    def start(self, facts: Facts) -> None:
        self._starts()

    def take(self, vitals: Vitals) -> None:
        self._runs()

    def end(self, error: BaseException | None, summary: Summary | None) -> None:
        """Do nothing."""


@dataclass
class Turn:
    """A running validation.

    Attributes:
        ticket: The newest checkpoint at its start; it validates this one, or a newer one that has just arrived.
        begun: Whether its ranks run; until then it may be cancelled.
        stop: Ends its run.
    """

    ticket: Ticket
    begun: bool = False
    stop: threading.Event = field(default_factory=threading.Event)
    outcome: Validated | BaseException | None = None
    thread: threading.Thread | None = None


class Order:
    """Decides when to validate which checkpoint: one at a time, the newest one. Does no I/O.

    Training never waits for a validation, and at most one checkpoint waits. If validation is slower than training, the
    newest checkpoint replaces the previous one, whose epoch is not validated.
    """

    def __init__(self) -> None:
        self.results = Results()
        self.turn: Turn | None = None
        self._done: Ticket | None = None

    def next(self, waiting: list[Ticket], wants_no_more: bool) -> Turn | None:
        """Return the validation to start now, if any. Ranks that want no more wait for one that has begun.

        ``waiting`` has the waiting checkpoints, the oldest first.
        """
        if self.turn is not None:
            if wants_no_more and not self.turn.begun:
                self.turn.stop.set()
            return None
        if wants_no_more:
            self.results.ended = True
        elif waiting and waiting[-1] != self._done:
            self.turn = Turn(waiting[-1])
            return self.turn
        return None

    def starts(self, newest: Ticket | None) -> None:
        """Record that the validation has its slots, and will take the newest checkpoint."""
        assert self.turn is not None
        self.turn.ticket = newest or self.turn.ticket

    def runs(self) -> None:
        """Record that its ranks have reported. Slots alone are not enough: others may hold them without our knowing."""
        assert self.turn is not None
        self.turn.begun = True

    def end(self) -> str | None:
        """Record the result of the validation, which is over.

        Returns:
            The reason if it failed, otherwise None.
        """
        assert self.turn is not None
        turn, self.turn = self.turn, None
        if isinstance(turn.outcome, tuple):
            ticket, means = turn.outcome
            self._done = ticket
            self.results.add(ticket, means)
            return None
        if turn.outcome is None or turn.stop.is_set():
            return None
        if isinstance(turn.outcome, StartTimeoutError) and not turn.begun:  # while waiting for slots that nobody counts
            return None
        self._done = turn.ticket
        self.results.add(turn.ticket, {})
        return f"{type(turn.outcome).__name__}: {turn.outcome}"


class Beside:
    """A context whose thread validates the checkpoints that a training leaves in the folder of its run.

    Args:
        place: The folder of the run.
        validate: Runs a validation, given the results so far and its tracker; raises KeyboardInterrupt if it is
            stopped.
        history: The history that the training continues from.
        inherit: Wraps a function for another thread, with this thread's local properties.
    """

    def __init__(
        self,
        place: MeetingPlace,
        validate: Callable[[Results, Tracker], Validated | None],
        history: History,
        inherit: Callable[[Callable[[], None]], Callable[[], None]],
    ) -> None:
        self._place, self._validate, self._inherit = place, validate, inherit
        self._order, self._over, self._failed = Order(), threading.Event(), False
        self._unpublished, self._told_at = True, time.monotonic()
        self._kept = {int(row["epoch"]): row for row in history}
        self._thread = threading.Thread(target=inherit(self._watch), name="spark_hvd-validation", daemon=True)

    def __enter__(self) -> None:
        before = self._place.results()
        # Validations that the rows of the history have already count for the best epoch too.
        known: Mapping[int, Any] = {
            epoch: (generation_of(row), _of_validation(row)) for epoch, row in self._kept.items()
        }
        finished = {
            epoch: each
            for epoch, each in before.epochs.items()
            if epoch in known and each[1] and each[0] == generation_of(self._kept[epoch])
        }
        self._order.results.epochs = {**known, **finished}
        self._thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if (turn := self._order.turn) is not None:
            turn.stop.set()
        self._thread.join()
        try:
            if self._place.owner.is_owner:
                self._place.clear(results=error is None)
        except StoreError as left:
            _log.warning("checkpoints of a validation are left behind: %s", left)

    def _watch(self) -> None:
        every = _EVERY_HERE if self._place.store.is_local else _EVERY
        while not self._over.wait(every):
            try:
                self._look()
            except Exception as error:  # errors of the store or of Spark; ranks wait for the reports of this thread
                if not self._failed:
                    self._failed = True
                    _log.warning("validation in the background: %s: %s; it is tried again", type(error).__name__, error)
        if (turn := self._order.turn) is not None and turn.thread is not None:
            turn.stop.set()
            turn.thread.join()

    def _look(self) -> None:
        if not self._place.owner.is_owner:
            return  # its ranks have not begun, or another fit of the run has
        order, turn = self._order, self._order.turn
        if turn is not None and (turn.thread is None or not turn.thread.is_alive()):
            self._unpublished = True
            if (failure := order.end()) is not None:
                _log.warning(
                    "validating epoch %d in the background failed; its row of the history has no val_ values, but the "
                    "training continues: %s",
                    turn.ticket.epoch,
                    failure,
                )
        ended = order.results.ended
        begins = order.next(self._place.waiting(), self._place.wants_no_more)
        if begins is not None:
            try:
                target = self._inherit(lambda: self._run(begins))
                begins.thread = threading.Thread(target=target, name="spark_hvd-validate", daemon=True)
                begins.thread.start()
            except Exception as error:
                begins.thread, begins.outcome = None, error
        if self._unpublished or order.results.ended != ended or time.monotonic() - self._told_at > BEAT:
            self._unpublished = True
            self._place.publish(order.results)
            self._unpublished, self._told_at = False, time.monotonic()

    def _run(self, turn: Turn) -> None:
        def starts() -> None:
            self._order.starts(next(reversed(self._place.waiting()), None))

        try:
            with stopped_by(turn.stop):
                turn.outcome = self._validate(self._order.results, Begun(starts, self._order.runs))
        except BaseException as error:  # including errors of the user's code in the ranks
            turn.outcome = error


def _of_validation(row: Mapping[str, Any]) -> dict[str, float]:
    return {key: value for key, value in row.items() if key.startswith("val_")}
