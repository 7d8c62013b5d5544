"""Fits and trials of one driver on local[2]: in parallel if there are enough slots, otherwise one after the other."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import pytest
from pyspark.ml.evaluation import RegressionEvaluator
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder

from spark_hvd import run
from spark_hvd.estimators import Callback
from tests.conftest import wait_until
from tests.spark.estimator_support import estimator, frame

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

optuna: Any = pytest.importorskip("optuna")

from spark_hvd.tuning import optimize  # noqa: E402

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def meet(place: Path) -> None:
    """Wait until another fit has reached this point: the first to arrive needs one at the same time."""
    (place / uuid.uuid4().hex).touch()
    wait_until(lambda: len(list(place.iterdir())) > 1, 120)


class Meeting(Callback):
    def __init__(self, place: Path) -> None:
        self.place = place

    def on_train_begin(self, state: Any) -> None:
        meet(self.place)


@pytest.mark.slow
def test_cross_validation_fits_side_by_side(spark: SparkSession, tmp_path: Path) -> None:
    made = estimator(num_proc=1, epochs=1, callbacks=[Meeting(tmp_path)])
    validator = CrossValidator(
        estimator=made,
        estimatorParamMaps=ParamGridBuilder().addGrid(made.batch_size, [8, 16]).build(),
        evaluator=RegressionEvaluator(labelCol="value"),
        numFolds=2,
        parallelism=2,
        seed=1,
    )
    validator.fit(frame(spark))
    assert len(list(tmp_path.iterdir())) == 5  # two folds of two, and the best one again


@pytest.mark.slow
@pytest.mark.usefixtures("no_leaks")
def test_trials_share_the_slots_and_wait_for_more(spark: SparkSession, tmp_path: Path) -> None:
    def objective(trial: Any) -> float:
        ranks = trial.suggest_int("ranks", 1, 2)
        if ranks == 2:  # called before the others have their slots, it would come before one of them
            wait_until(lambda: len(list(tmp_path.iterdir())) > 1, 120)
        values = run(meet if ranks == 1 else len, (tmp_path if ranks == 1 else "ab",), num_proc=ranks, verbose=0)
        assert spark.sparkContext.getLocalProperty("spark.job.description") == f"trial {trial.number}"
        return float(len(values))

    study = optuna.create_study()
    for ranks in (1, 1, 2):
        study.enqueue_trial({"ranks": ranks})
    optimize(study, objective, 3, parallel=3, spark=spark)
    assert sorted((trial.state.name, trial.value) for trial in study.trials) == [
        ("COMPLETE", 1.0),
        ("COMPLETE", 1.0),
        ("COMPLETE", 2.0),
    ]
    assert spark.sparkContext.getLocalProperty("spark.job.description") is None


def test_ctrl_c_cancels_one_job_after_the_other(spark: SparkSession, tmp_path: Path) -> None:
    def hang(batches: Any) -> Any:
        (tmp_path / "begun").touch()
        time.sleep(600)
        yield from batches

    def objective(trial: Any) -> float:
        for _ in range(2):
            with contextlib.suppress(Exception):
                spark.range(0, 1, 1, 1).mapInArrow(hang, "id long").collect()
        return 0.0

    def interrupt() -> None:
        wait_until((tmp_path / "begun").exists, 60)
        os.kill(os.getpid(), signal.SIGINT)

    presses = threading.Thread(target=interrupt)
    presses.start()
    with pytest.raises(KeyboardInterrupt):
        optimize(optuna.create_study(), objective, 1, spark=spark)
    presses.join()
