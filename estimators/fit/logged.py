"""Logs the checkpoint of each epoch of a fit as an MLflow model, with the epoch's metrics; registers the best one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from spark_hvd.estimators.training.checkpoint import Checkpoints, of_epoch
from spark_hvd.estimators.training.history import History, monitored
from spark_hvd.estimators.training.spec import TrainSpec

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_log = logging.getLogger(__name__)


def log_checkpoints(
    tracker: Any, spec: TrainSpec, df: DataFrame, history: History, made: Callable[[Mapping[str, Any]], Any]
) -> None:
    """Log the weights that ranks have kept of each epoch to the run of an ``MlflowTracker``, then delete them.

    A failure is only a warning: the training is over, and its model must not be lost.

    Args:
        tracker: The tracker of the fit.
        spec: The fit, which ``keeps_epochs``.
        df: The rows of the fit.
        history: The history of the whole fit.
        made: Returns the Spark ML model of a checkpoint.
    """
    with _warned(), _active(tracker.run_id), _warned():  # within the run, which has ended well whatever fails here
        checkpoints, name = Checkpoints(spec.store, spec.run_id), tracker.registered_model_name
        kept = [epoch for epoch in range(1, len(history) + 1) if checkpoints.exists(of_epoch(epoch))]
        best = None if name is None else _best(history, spec, name)
        for epoch in kept:
            model = made(checkpoints.read(of_epoch(epoch)).state)
            register = name if epoch == best else None
            model.log_to_mlflow(df, f"checkpoint-{epoch}", registered_model_name=register, step=epoch)
            checkpoints.discard(of_epoch(epoch))


def _best(history: History, spec: TrainSpec, name: str) -> int | None:
    try:
        key = monitored({key: 0.0 for row in history for key in row}, spec.monitor)
        return int(history.best(key, spec.monitor_mode)["epoch"])
    except (KeyError, ValueError) as error:  # a Lightning module may log no loss
        _log.warning(
            "no checkpoint is registered as %r in MLflow, because the best one is unknown: %s", name, error.args[0]
        )
        return None


@contextmanager
def _warned() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # errors of the server, of the store, or of pickling
        _log.warning(
            "MLflow lacks the checkpoints of some epochs; the trained model is not affected: %s: %s. "
            "model.log_to_mlflow(df) logs it",
            type(error).__name__,
            error,
        )


@contextmanager
def _active(run_id: str) -> Iterator[None]:
    """Make a run of MLflow active, and its experiment, which MLflow compares with the current one."""
    import mlflow
    from mlflow.tracking import fluent

    active = mlflow.active_run()
    if active is not None and active.info.run_id == run_id:
        yield
        return
    experiment = mlflow.get_run(run_id).info.experiment_id
    before: Any = getattr(fluent, "_active_experiment_id", None)  # no public function of MLflow 3 returns it
    differs = before is not None and before != experiment
    if differs:
        mlflow.set_experiment(experiment_id=experiment)
    try:
        with mlflow.start_run(run_id=run_id, nested=True):
            yield
    finally:
        if differs:
            mlflow.set_experiment(experiment_id=before)
