"""Records trials in MLflow, each as a run below the one that is active where the study is optimised."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import optuna

from spark_hvd.runner.watch.tracking import without_password

_log = logging.getLogger(__name__)
Value = float | Sequence[float]


class Parent:
    """The MLflow run that is active in the current thread, if there is one."""

    def __init__(self) -> None:
        mlflow = sys.modules.get("mlflow")  # a program that has not imported it has no run
        self._run: Any = None if mlflow is None else mlflow.active_run()

    @contextmanager
    def child(self, trial: optuna.Trial) -> Iterator[Callable[[Value], None]]:
        """Start a run below it for a trial. It is active in this thread, and ends with the trial's status.

        Yields:
            A function that records the trial's value.

        Raises:
            mlflow.exceptions.MlflowException: the run cannot be created.
        """
        if self._run is None:
            yield lambda value: None
            return
        import mlflow

        parent = self._run.info
        mlflow.start_run(
            experiment_id=parent.experiment_id,
            run_name=f"trial {trial.number}",
            nested=True,
            parent_run_id=parent.run_id,
        )
        values: list[Value] = []
        state, status = "FAIL", "FAILED"
        try:
            yield values.append
            state, status = "COMPLETE", "FINISHED"
        except optuna.TrialPruned:
            state, status = "PRUNED", "KILLED"
            raise
        except KeyboardInterrupt:
            status = "KILLED"
            raise
        finally:
            try:
                mlflow.log_params(trial.params)
                mlflow.log_metrics(_named(trial, values[0]) if values else {})
                mlflow.set_tags({"optuna.trial": trial.number, "optuna.state": state})
            except Exception as error:  # a failure of the server is not one of the trial
                _log.warning("the record of trial %d is incomplete: %s", trial.number, without_password(str(error)))
            finally:
                mlflow.end_run(status)


def _named(trial: optuna.Trial, value: Value) -> dict[str, float]:
    values = list(value) if isinstance(value, Sequence) else [value]
    names = trial.study.metric_names or (["value"] if len(values) == 1 else [f"value_{i}" for i in range(len(values))])
    return dict(zip(names, values, strict=False))
