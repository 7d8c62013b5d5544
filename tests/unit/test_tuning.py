"""Trials of an Optuna study without ranks: what is reported and pruned, failures, MLflow, and Ctrl-C."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from spark_hvd.runner import StopRun
from spark_hvd.runner.stopping import check_stop
from spark_hvd.runner.watch.tracking import Tracking
from tests.conftest import wait_until
from tests.unit.test_history import vitals

optuna: Any = pytest.importorskip("optuna")

from spark_hvd.tuning import TrialFailedError, TrialTracker, optimize  # noqa: E402


class Below(optuna.pruners.BasePruner):
    """Prunes values below zero."""

    def prune(self, study: Any, trial: Any) -> bool:
        return bool(trial.intermediate_values[trial.last_step] < 0)


class Notes:
    """A tracker that records what it receives."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def start(self, facts: Any) -> None:
        self.told.append("start")

    def take(self, vitals: Any) -> None:
        self.told.append(vitals.rank)

    def end(self, error: Any, summary: Any) -> None:
        self.told.append(error)


def rows(*values: float) -> list[dict[str, float]]:
    return [{"epoch": number, "loss": 9.0, "val_loss": value} for number, value in enumerate(values, 1)]


def states(study: Any) -> list[str]:
    return [trial.state.name for trial in study.trials]


def test_epochs_of_rank_0_are_reported_once_and_prune() -> None:
    study, notes = optuna.create_study(pruner=Below()), Notes()
    trial = study.ask()
    tracking = Tracking(TrialTracker(trial, "val_loss", tracker=notes))
    tracking.start({})
    tracking.take(vitals(1, epochs_done=rows(5.0, 5.0, 5.0)))
    tracking.take(vitals(0, epochs_done=rows(3.0)))
    tracking.take(vitals(0, epochs_done=rows(3.0, 2.0)))
    tracking.take(vitals(0, epochs_done=rows(8.0)[:1]))  # made again after a loss
    with pytest.raises(StopRun, match="after epoch 3, with val_loss -1") as stopped:
        tracking.take(vitals(0, epochs_done=rows(3.0, 2.0, -1.0, 7.0)))
    assert isinstance(stopped.value, optuna.TrialPruned)
    tracking.end(stopped.value, None)
    assert study.trials[0].intermediate_values == {1: 3.0, 2: 2.0, 3: -1.0}
    assert notes.told == ["start", 1, 0, 0, 0, 0, stopped.value]


def test_what_is_told_late_of_an_epoch_is_reported_of_that_epoch() -> None:
    study = optuna.create_study(pruner=optuna.pruners.NopPruner())
    tracker = TrialTracker(study.ask(), "val_loss")
    plain = [{"epoch": epoch, "loss": 9.0} for epoch in (1, 2, 3)]
    tracker.take(vitals(0, epochs_done=plain))
    tracker.take(vitals(0, epochs_done=[*plain, {"epoch": 2, "val_loss": 5.0}]))
    tracker.take(vitals(0, epochs_done=[*plain, {"epoch": 2, "val_loss": 5.0}, {"epoch": 3, "val_loss": 4.0}]))
    assert study.trials[0].intermediate_values == {2: 5.0, 3: 4.0}


def test_a_metric_that_nobody_reports_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    tracker = TrialTracker(optuna.create_study().ask(), "vall_loss")
    tracker.take(vitals(0, epochs_done=rows(3.0)))
    tracker.end(None, None)
    assert "nothing was reported as monitor='vall_loss': its epochs have loss, val_loss" in caplog.text
    with pytest.raises(ValueError, match="2 objectives"):
        TrialTracker(optuna.create_study(directions=["minimize", "maximize"]).ask(), "loss")


def test_trials_run_side_by_side_and_a_failed_one_is_a_failed_one() -> None:
    both = threading.Barrier(2, timeout=60)

    def objective(trial: Any) -> float:
        if trial.number < 2:
            both.wait()
        if trial.number == 1:
            raise RuntimeError("no luck\nand much more")
        if trial.number == 2:
            raise optuna.TrialPruned
        return float(trial.suggest_float("x", 1, 2))

    study = optuna.create_study()
    ended: list[int] = []
    optimize(study, objective, 4, parallel=2, callbacks=[lambda study, trial: ended.append(trial.number)])
    assert states(study) == ["COMPLETE", "FAIL", "PRUNED", "COMPLETE"]
    assert study.trials[1].user_attrs == {"error": "RuntimeError: no luck"}
    assert sorted(ended) == [0, 1, 2, 3]


def test_errors_that_end_a_study() -> None:
    def objective(trial: Any) -> float:
        raise [KeyError, ValueError][trial.number]("lr")

    study = optuna.create_study()
    with pytest.raises(ValueError, match="lr"):
        optimize(study, objective, 5, catch=(KeyError,))
    assert states(study) == ["FAIL", "FAIL"]
    with pytest.raises(TrialFailedError, match="every trial failed, the last with KeyError: 'lr'") as failed:
        optimize(optuna.create_study(), objective, 1)
    assert isinstance(failed.value.__cause__, KeyError)
    with pytest.raises(ValueError, match="parallel=0: expected"):
        optimize(study, objective, 5, parallel=0)
    with pytest.raises(TypeError, match="n_jobs=2: expected parallel=2"):
        optimize(study, objective, 5, n_jobs=2)


def test_ctrl_c_ends_every_trial() -> None:
    begun = [threading.Event(), threading.Event()]

    def objective(trial: Any) -> float:
        begun[trial.number].set()
        if trial.number == 1:
            begun[0].wait()
            os.kill(os.getpid(), signal.SIGINT)
        while True:  # as a run waits
            check_stop()
            threading.Event().wait(0.01)

    study = optuna.create_study()
    with pytest.raises(KeyboardInterrupt):
        optimize(study, objective, 10, parallel=2)
    assert states(study) == ["FAIL", "FAIL"]
    wait_until(lambda: not [each for each in threading.enumerate() if each.name.startswith("spark_hvd-tuning")])


def test_trials_are_nested_runs_of_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow: Any = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(f"file://{tmp_path}/mlruns")
    try:
        mlflow.set_experiment("Default")

        def objective(trial: Any) -> float:
            x = trial.suggest_float("x", 1, 2)
            mlflow.log_metric("mine", x)
            if trial.number == 1:
                raise RuntimeError
            if trial.number == 2:
                raise optuna.TrialPruned
            return float(x)

        study = optuna.create_study()
        with mlflow.start_run() as parent:
            optimize(study, objective, 3, parallel=2)
        found = mlflow.search_runs(output_format="list", order_by=["tags.`optuna.trial`"])
        found = [run for run in found if run.info.run_id != parent.info.run_id]
        assert [run.info.run_name for run in found] == ["trial 0", "trial 1", "trial 2"]
        assert {run.data.tags["mlflow.parentRunId"] for run in found} == {parent.info.run_id}
        assert [run.info.status for run in found] == ["FINISHED", "FAILED", "KILLED"]
        assert [run.data.tags["optuna.state"] for run in found] == ["COMPLETE", "FAIL", "PRUNED"]
        first = study.trials[0]
        assert found[0].data.metrics == {"mine": first.value, "value": first.value}
        assert float(found[0].data.params["x"]) == first.value
    finally:
        mlflow.set_tracking_uri(before)
