"""Validation in the background: the driver starts a run for the newest checkpoint, one such run at a time."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

from spark_hvd.estimators.training.background_validation import (
    HEARTBEAT_SECONDS,
    Results,
    ValidationFolder,
    ValidationRequest,
    generation_of,
)
from spark_hvd.estimators.training.history import History
from spark_hvd.runner.outcome.errors import StartTimeoutError
from spark_hvd.runner.stopping import stopped_by
from spark_hvd.runner.watch.tracking import Facts, Tracker
from spark_hvd.store.errors import StoreError

if TYPE_CHECKING:
    from spark_hvd.runner.watch.summary import Summary
    from spark_hvd.world.vitals import Vitals

_log = logging.getLogger(__name__)
Validated = tuple[ValidationRequest, dict[str, float]]
_LOCAL_INTERVAL, _INTERVAL = 0.1, 1.0
"""Seconds between two checks of the run's folder, on this machine's disks and elsewhere."""


class StartTracker(Tracker):
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
class ValidationRun:
    """A running validation.

    Attributes:
        request: The newest checkpoint when it started. It validates this one, or a newer one that has just arrived.
        begun: Whether its ranks run. Until then it may be cancelled.
        stop: Ends its run.
    """

    request: ValidationRequest
    begun: bool = False
    stop: threading.Event = field(default_factory=threading.Event)
    outcome: Validated | BaseException | None = None
    thread: threading.Thread | None = None


class ValidationScheduler:
    """Decides when to validate which checkpoint: the newest one, one at a time. Does no I/O.

    Training never waits for a validation, and at most one checkpoint waits. If validation is slower than training, the
    newest checkpoint replaces the previous one, whose epoch is not validated.
    """

    def __init__(self) -> None:
        self.results = Results()
        self.run: ValidationRun | None = None
        self._done: ValidationRequest | None = None

    def next(self, waiting: list[ValidationRequest], end_requested: bool) -> ValidationRun | None:
        """Return the validation to start now, if any. Ranks that have requested the end wait for one that has begun.

        ``waiting`` has the waiting checkpoints, the oldest first.
        """
        if self.run is not None:
            if end_requested and not self.run.begun:
                self.run.stop.set()
            return None
        if end_requested:
            self.results.ended = True
        elif waiting and waiting[-1] != self._done:
            self.run = ValidationRun(waiting[-1])
            return self.run
        return None

    def starting(self, newest: ValidationRequest | None) -> None:
        """Record that the validation has its slots, and will take the newest checkpoint."""
        assert self.run is not None
        self.run.request = newest or self.run.request

    def running(self) -> None:
        """Record that its ranks have reported. Slots alone are not enough: other programs may hold them."""
        assert self.run is not None
        self.run.begun = True

    def end(self) -> str | None:
        """Record the result of the validation, which is over.

        Returns:
            The reason if it failed, otherwise None.
        """
        assert self.run is not None
        run, self.run = self.run, None
        if isinstance(run.outcome, tuple):
            request, means = run.outcome
            self._done = request
            self.results.add(request, means)
            return None
        if run.outcome is None or run.stop.is_set():
            return None
        if isinstance(run.outcome, StartTimeoutError) and not run.begun:  # while waiting for slots that nobody counts
            return None
        self._done = run.request
        self.results.add(run.request, {})
        return f"{type(run.outcome).__name__}: {run.outcome}"


class BackgroundValidator:
    """A context whose thread validates the checkpoints that a training leaves in the folder of its run.

    Args:
        folder: The folder of the run.
        validate: Runs a validation, given the results so far and its tracker; raises KeyboardInterrupt if it is
            stopped.
        history: The history that the training continues from.
        inherit: Wraps a function for another thread, with this thread's local properties.
    """

    def __init__(
        self,
        folder: ValidationFolder,
        validate: Callable[[Results, Tracker], Validated | None],
        history: History,
        inherit: Callable[[Callable[[], None]], Callable[[], None]],
    ) -> None:
        self._folder, self._validate, self._inherit = folder, validate, inherit
        self._scheduler, self._closed, self._failed = ValidationScheduler(), threading.Event(), False
        self._unpublished, self._published_at = True, time.monotonic()
        self._rows = {int(row["epoch"]): row for row in history}
        self._thread = threading.Thread(target=inherit(self._watch), name="spark_hvd-validation", daemon=True)

    def __enter__(self) -> None:
        before = self._folder.results()
        # Validations that the rows of the history have already count for the best epoch too.
        known: Mapping[int, Any] = {
            epoch: (generation_of(row), _of_validation(row)) for epoch, row in self._rows.items()
        }
        finished = {
            epoch: each
            for epoch, each in before.epochs.items()
            if epoch in known and each[1] and each[0] == generation_of(self._rows[epoch])
        }
        self._scheduler.results.epochs = {**known, **finished}
        self._thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        if (run := self._scheduler.run) is not None:
            run.stop.set()
        self._thread.join()
        try:
            if self._folder.owner.is_owner:
                self._folder.clear(results=error is None)
        except StoreError as left:
            _log.warning("checkpoints of a validation are left behind: %s", left)

    def _watch(self) -> None:
        every = _LOCAL_INTERVAL if self._folder.store.is_local else _INTERVAL
        while not self._closed.wait(every):
            try:
                self._look()
            except Exception as error:  # errors of the store or of Spark; ranks wait for the reports of this thread
                if not self._failed:
                    self._failed = True
                    _log.warning("validation in the background: %s: %s; it is tried again", type(error).__name__, error)
        if (run := self._scheduler.run) is not None and run.thread is not None:
            run.stop.set()
            run.thread.join()

    def _look(self) -> None:
        if not self._folder.owner.is_owner:
            return  # its ranks have not begun, or another fit of the run has
        scheduler, run = self._scheduler, self._scheduler.run
        if run is not None and (run.thread is None or not run.thread.is_alive()):
            self._unpublished = True
            if (failure := scheduler.end()) is not None:
                _log.warning(
                    "validating epoch %d in the background failed; its row of the history has no val_ values, but the "
                    "training continues: %s",
                    run.request.epoch,
                    failure,
                )
        ended = scheduler.results.ended
        begins = scheduler.next(self._folder.waiting(), self._folder.end_requested)
        if begins is not None:
            try:
                target = self._inherit(lambda: self._run(begins))
                begins.thread = threading.Thread(target=target, name="spark_hvd-validate", daemon=True)
                begins.thread.start()
            except Exception as error:
                begins.thread, begins.outcome = None, error
        if (
            self._unpublished
            or scheduler.results.ended != ended
            or time.monotonic() - self._published_at > HEARTBEAT_SECONDS
        ):
            self._unpublished = True
            self._folder.publish(scheduler.results)
            self._unpublished, self._published_at = False, time.monotonic()

    def _run(self, run: ValidationRun) -> None:
        def starts() -> None:
            self._scheduler.starting(next(reversed(self._folder.waiting()), None))

        try:
            with stopped_by(run.stop):
                run.outcome = self._validate(self._scheduler.results, StartTracker(starts, self._scheduler.running))
        except BaseException as error:  # including errors of the user's code in the ranks
            run.outcome = error


def _of_validation(row: Mapping[str, Any]) -> dict[str, float]:
    return {key: value for key, value in row.items() if key.startswith("val_")}
