"""The checkpoint of each epoch of a fit as a model of MLflow, with that epoch's metrics; the best one registered."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
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
    """Log the weights that ranks have kept of each epoch to the run of an ``MlflowTracker``; then delete them.

    A failure is only a warning: the training is over, and its model must not be lost.

    Args:
        tracker: The tracker of the fit.
        spec: The fit, which ``keeps_epochs``.
        df: Its rows.
        history: The history of the whole fit.
        made: The Spark ML model of a checkpoint.
    """
    checkpoints = Checkpoints(spec.store, spec.run_id)
    kept = [epoch for epoch in range(1, len(history) + 1) if checkpoints.exists(of_epoch(epoch))]
    key = monitored({name: 0.0 for row in history for name in row}, spec.monitor)
    best = history.best(key, spec.monitor_mode)["epoch"]
    try:
        import mlflow

        active = mlflow.active_run()
        theirs = active is not None and active.info.run_id == tracker.run_id
        with nullcontext() if theirs else mlflow.start_run(run_id=tracker.run_id, nested=True):
            for epoch in kept:
                model = made(checkpoints.read(of_epoch(epoch)).state)
                register = tracker.registered_model_name if epoch == best else None
                model.log_to_mlflow(df, f"checkpoint-{epoch}", registered_model_name=register, step=epoch)
                checkpoints.discard(of_epoch(epoch))
    except Exception as error:  # the server's, the store's, or that of pickling
        _log.warning(
            "MLflow lacks the checkpoints of some epochs; the trained model is not affected: %s: %s. "
            "model.log_to_mlflow(df) logs it",
            type(error).__name__,
            error,
        )
