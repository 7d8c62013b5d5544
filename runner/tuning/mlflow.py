"""Trials in MLflow: each a run below the one that is active where the study is optimized."""

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
    """The run of MLflow that is active in the thread that makes this, if there is one."""

    def __init__(self) -> None:
        mlflow = sys.modules.get("mlflow")  # who has not imported it has no run
        self._run: Any = None if mlflow is None else mlflow.active_run()

    @contextmanager
    def child(self, trial: optuna.Trial) -> Iterator[Callable[[Value], None]]:
        """A run below it for a trial, active in this thread meanwhile; it ends as the trial does.

        Yields:
            What is to be told the trial's value.

        Raises:
            mlflow.exceptions.MlflowException: there can be no such run.
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
        told: list[Value] = []
        state, status = "FAIL", "FAILED"
        try:
            yield told.append
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
                mlflow.log_metrics(_named(trial, told[0]) if told else {})
                mlflow.set_tags({"optuna.trial": trial.number, "optuna.state": state})
            except Exception as error:  # a server that fails is no failure of the trial
                _log.warning("the record of trial %d is incomplete: %s", trial.number, without_password(str(error)))
            finally:
                mlflow.end_run(status)


def _named(trial: optuna.Trial, value: Value) -> dict[str, float]:
    values = list(value) if isinstance(value, Sequence) else [value]
    names = trial.study.metric_names or (["value"] if len(values) == 1 else [f"value_{i}" for i in range(len(values))])
    return dict(zip(names, values, strict=False))
