"""``TrialTracker``: a run tells an Optuna trial how it goes, epoch by epoch, and ends early where that is pruned."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import optuna

from spark_hvd.runner.watch.tracking import Facts, StopRun, Tracker, Tracking

if TYPE_CHECKING:
    from spark_hvd.runner.watch.summary import Summary
    from spark_hvd.world.vitals import Vitals

_log = logging.getLogger(__name__)


class _Pruned(StopRun, optuna.TrialPruned):
    """Ends the run, and then the trial."""


class TrialTracker(Tracker):
    """The tracker of a run that is, or is part of, an Optuna trial; works with ``study.optimize`` too.

    After each epoch it gives rank 0's value of ``monitor`` to ``trial.report``, with the number of the epoch, from 1,
    as its step. Where ``trial.should_prune()`` then says so, the run stops its ranks and raises
    ``optuna.TrialPruned``. An epoch is known by ``hvd.progress(..., epoch=...)``, or is one of an estimator.

    Args:
        trial: Of the objective.
        monitor: A name given to ``report`` of ``hvd.progress``, with the stage before it where that is not "train"
            ("validation/loss"); or a key of an estimator's history ("val_loss").
        tracker: A further one that is told of the run, such as ``MlflowTracker()``.

    Raises:
        ValueError: the study has several objectives, which Optuna does not prune by.
        TypeError: ``tracker`` is none.
    """

    __module__ = "spark_hvd.tuning"

    def __init__(self, trial: optuna.Trial, monitor: str, *, tracker: Tracker | None = None) -> None:
        if len(trial.study.directions) > 1:
            raise ValueError(
                f"the study has {len(trial.study.directions)} objectives, and Optuna prunes trials of one only: leave "
                "out TrialTracker"
            )
        self._trial, self._monitor = trial, monitor
        self._further = Tracking(tracker)
        self._epoch, self._reported = 0, False
        self._others: set[str] = set()

    def start(self, facts: Facts) -> None:
        """See base class."""
        self._further.start(facts)

    def take(self, vitals: Vitals) -> None:
        """See base class.

        Raises:
            StopRun: the trial is pruned; an ``optuna.TrialPruned`` too.
        """
        self._further.take(vitals)
        if vitals.rank != 0:
            return
        for row in vitals.epochs_done:
            epoch = int(row["epoch"])
            if epoch <= self._epoch:  # told before, or done again after a loss
                continue
            self._others |= row.keys() - {"epoch", self._monitor}
            if (value := row.get(self._monitor)) is None:  # it may come later
                continue
            self._epoch = epoch
            self._reported = True
            self._trial.report(value, epoch)
            if self._trial.should_prune():
                raise _Pruned(f"after epoch {epoch}, with {self._monitor} {value:g}")

    def end(self, error: BaseException | None, summary: Summary | None) -> None:
        """See base class; warns where nothing was ever reported."""
        self._further.end(error, summary)
        if error is None and not self._reported:
            there = f"its epochs have {', '.join(sorted(self._others))}" if self._others else "it told of no epoch"
            _log.warning(
                "trial %d: nothing is reported as monitor=%r: %s. Give the value to hvd.progress(..., epoch=epoch), by "
                "bar.report(%s=...)",
                self._trial.number,
                self._monitor,
                there,
                self._monitor.rpartition("/")[2],
            )
