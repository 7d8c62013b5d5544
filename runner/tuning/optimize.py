"""``optimize``: an Optuna study whose trials are runs, several at a time, which are stopped together."""

from __future__ import annotations

import logging
import queue
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import optuna

from spark_hvd.runner.outcome.errors import ClusterError
from spark_hvd.runner.spark.job import cancel_jobs, inheriting
from spark_hvd.runner.spark.names import jobs_tagged
from spark_hvd.runner.spark.session import active_session
from spark_hvd.runner.stopping import check_stop, stopped_by
from spark_hvd.runner.supervise.team import in_threads
from spark_hvd.runner.tuning.mlflow import Parent
from spark_hvd.runner.watch.tracking import Facts, StopRun, Tracker, Tracking

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from spark_hvd.runner.watch.summary import Summary
    from spark_hvd.world.vitals import Vitals

_log = logging.getLogger(__name__)


class _Pruned(StopRun, optuna.TrialPruned):
    """Ends the run, and then the trial."""


class TrialTracker(Tracker):
    """The tracker of a run within an Optuna trial, which also works with ``study.optimize``.

    After each epoch, it passes rank 0's value of ``monitor`` to ``trial.report``, with the number of the epoch, from 1,
    as the step. If ``trial.should_prune()`` is then true, the run stops its ranks and raises ``optuna.TrialPruned``.
    Epochs are those of ``hvd.progress(..., epoch=...)`` or of an estimator.

    Args:
        trial: The trial of the objective.
        monitor: A name given to ``report`` of ``hvd.progress``, prefixed with the stage if that is not "train"
            ("validation/loss"); or a key of an estimator's history ("val_loss").
        tracker: Another tracker to call, such as ``MlflowTracker()``.

    Raises:
        ValueError: The study has several objectives, for which Optuna does not prune.
        TypeError: ``tracker`` is not a tracker.
    """

    __module__ = "spark_hvd.tuning"

    def __init__(self, trial: optuna.Trial, monitor: str, *, tracker: Tracker | None = None) -> None:
        if len(trial.study.directions) > 1:
            raise ValueError(
                f"the study has {len(trial.study.directions)} objectives, but Optuna prunes only studies of one: leave "
                "TrialTracker out"
            )
        self._trial, self._monitor = trial, monitor
        self._further = Tracking(tracker)
        self._epoch, self._reported = 0, False
        self._others: set[str] = set()

    def start(self, facts: Facts) -> None:
        self._further.start(facts)

    def take(self, vitals: Vitals) -> None:
        """See base class.

        Raises:
            StopRun: the trial is pruned. The exception is also an ``optuna.TrialPruned``.
        """
        self._further.take(vitals)
        if vitals.rank != 0:
            return
        for row in vitals.epochs_done:
            epoch = int(row["epoch"])
            if epoch <= self._epoch:  # reported before, or repeated after a loss
                continue
            self._others |= row.keys() - {"epoch", self._monitor}
            if (value := row.get(self._monitor)) is None:  # it may arrive later
                continue
            self._epoch = epoch
            self._reported = True
            self._trial.report(value, epoch)
            if self._trial.should_prune():
                raise _Pruned(f"after epoch {epoch}, with {self._monitor} {value:g}")

    def end(self, error: BaseException | None, summary: Summary | None) -> None:
        """See base class. Warns if the monitored value was never reported."""
        self._further.end(error, summary)
        if error is None and not self._reported:
            found = f"its epochs have {', '.join(sorted(self._others))}" if self._others else "it reported no epoch"
            _log.warning(
                "trial %d: nothing was reported as monitor=%r: %s. Report the value in hvd.progress(..., epoch=epoch) "
                "with bar.report(%s=...)",
                self._trial.number,
                self._monitor,
                found,
                self._monitor.rpartition("/")[2],
            )


Value = float | Sequence[float]
_GRACE = 0.5
"""Seconds that trials get to end by themselves."""


class TrialFailedError(RuntimeError):
    """An objective failed. The message is the first line of the error, which is its cause."""

    __module__ = "spark_hvd.tuning"


def optimize(
    study: optuna.Study,
    objective: Callable[[optuna.Trial], Value],
    n_trials: int | None = None,
    *,
    parallel: int = 1,
    catch: tuple[type[Exception], ...] = (Exception,),
    spark: SparkSession | None = None,
    **options: Any,
) -> None:
    """Run trials of an Optuna study like ``study.optimize``, several at a time, each on its share of the cluster.

    ``objective(trial)`` is called in this program, and calls ``spark_hvd.run`` or the ``fit`` of an estimator as usual.
    Each trial may use another ``num_proc``. If there are too few slots for all, trials wait for each other. To prune
    trials, pass a :class:`TrialTracker` in the run's ``reporting``, or as the estimator's ``tracker``.

    If an MLflow run is active, each trial becomes a nested run, active in the objective, with the trial's parameters,
    value and state.

    Args:
        study: The Optuna study.
        objective: Function from a trial to its value (or values). Called in separate threads, which have this thread's
            local properties of Spark.
        n_trials: Number of trials; None runs trials until ``timeout``.
        parallel: Number of simultaneous trials.
        catch: Exceptions of the objective that do not end the study. Such a trial has the state FAIL, and the first
            line of the error as its user attribute "error".
        spark: The session; None for the active one, if there is one.
        options: Other options of ``study.optimize``: timeout, callbacks, show_progress_bar, gc_after_trial.

    Raises:
        ValueError, TypeError: An argument is wrong.
        TrialFailedError: Every trial failed.
        KeyboardInterrupt: after the ranks of every trial have been stopped; these trials have the state FAIL.
    """
    if not isinstance(parallel, int) or parallel < 1:
        raise ValueError(f"parallel={parallel!r}: expected a number of trials, at least 1")
    if "n_jobs" in options:
        raise TypeError(f"n_jobs={options['n_jobs']!r}: expected parallel={options['n_jobs']!r}")
    trials = _Trials(objective, catch, _session(spark), parallel)

    def work(_: int) -> None:
        study.optimize(trials, n_trials, n_jobs=parallel, catch=(TrialFailedError,), **options)

    # When interrupted, Optuna would wait until all trials have ended by themselves. We stop them.
    working: list[futures.Future[None]] = []
    try:
        in_threads(work, 1, "tuning", working)
        futures.wait(working)
    except BaseException:
        trials.stop(working)
        raise
    working[0].result()
    trials.check()


class _Trials:
    """The objective that Optuna's threads call."""

    def __init__(
        self,
        objective: Callable[[optuna.Trial], Value],
        catch: tuple[type[Exception], ...],
        session: SparkSession | None,
        parallel: int,
    ) -> None:
        self._objective, self._catch, self._session = objective, catch, session
        self._tag = f"spark_hvd-tuning-{uuid.uuid4().hex[:12]}"
        self._parent = Parent()
        self._signal = threading.Event()
        self._last_failure: TrialFailedError | None = None
        self._succeeded = False
        # Each call has its own copy of Spark's local properties: threads that share them would overwrite each other's.
        self._calls: queue.SimpleQueue[Callable[[optuna.Trial], Value]] = queue.SimpleQueue()
        for _ in range(parallel):
            self._calls.put(self._run if session is None else inheriting(session, self._run))

    def __call__(self, trial: optuna.Trial) -> Value:
        call = self._calls.get()
        try:
            return call(trial)
        finally:
            self._calls.put(call)

    def _run(self, trial: optuna.Trial) -> Value:
        tagged: AbstractContextManager[None] = nullcontext()
        if self._session is not None:
            tagged = jobs_tagged(self._session, self._tag, f"trial {trial.number}")
        with self._noted(trial), stopped_by(self._signal), tagged, self._parent.child(trial) as log:
            check_stop()
            value = self._objective(trial)
            log(value)
        return value

    @contextmanager
    def _noted(self, trial: optuna.Trial) -> Iterator[None]:
        try:
            yield
        except optuna.TrialPruned:
            self._succeeded = True
            raise
        except Exception as error:
            if self._signal.is_set():  # the error only says that the trial's jobs were cancelled
                raise KeyboardInterrupt from error
            line = f"{type(error).__name__}: {error}".splitlines()[0]
            trial.set_user_attr("error", line)
            if not isinstance(error, self._catch):
                raise
            failed = self._last_failure = TrialFailedError(line)
            raise failed from error
        self._succeeded = True

    def stop(self, working: list[futures.Future[None]]) -> None:
        """Stop all trials, and wait for their end."""
        self._signal.set()
        for each in working:
            each.cancel()  # has an effect only if its thread has not started
        if futures.wait(working, _GRACE).not_done and self._session is not None:
            cancel_jobs(self._session, self._tag, lambda seconds: not futures.wait(working, seconds).not_done)
        futures.wait(working)

    def check(self) -> None:
        """Raise a TrialFailedError if there were trials and all have failed."""
        if self._last_failure is not None and not self._succeeded:
            last = self._last_failure
            raise TrialFailedError(f"every trial failed, the last with {last}") from last.__cause__


def _session(spark: SparkSession | None) -> SparkSession | None:
    try:
        return active_session(spark)
    except (ClusterError, ImportError):
        if spark is not None:
            raise
        return None  # run_local needs no session
