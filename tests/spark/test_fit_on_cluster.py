"""Fits on executors that are separate processes, one of which is lost; a worker that is killed as it loads."""

from __future__ import annotations

import os
import re
import signal
import sys
from typing import TYPE_CHECKING

import cloudpickle
import pytest

import spark_hvd
from spark_hvd.estimators import Callback, SparkBackend, Store, TrainState
from spark_hvd.runner import ExecutorLostError
from tests.spark.estimator_support import estimator, frame, reference, same
from tests.spark.test_restarts_on_cluster import kill_executor, limit_executors
from tests.spark.test_torch_estimator import mse

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class KillsItsExecutor(Callback):
    """In the third epoch, rank 1 kills the JVM of its executor."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def on_epoch_begin(self, state: TrainState) -> None:
        if state.rank == 1 and state.epoch == 2 and not os.path.exists(self.marker):
            open(self.marker, "w").close()
            kill_executor()


@pytest.mark.night
@pytest.mark.timeout(300)
def test_without_a_store_the_trained_model_comes_back_by_itself(cluster: SparkSession, tmp_path: Path) -> None:
    killer = KillsItsExecutor(str(tmp_path / "killed"))
    made = estimator(
        epochs=4, validation="held", monitor="val_loss", restore_best_weights=True, callbacks=[killer], max_restarts=1
    )
    fitted = made.fit(frame(cluster, partitions=3))
    history = fitted.getHistory()
    assert [(row["epoch"], row["restarts"]) for row in history] == [(epoch, 1) for epoch in range(1, 5)], (
        "from the start"
    )
    assert history[-1]["loss"] < history[0]["loss"]
    losses = [
        row["loss"] for row in fitted.transform(frame(cluster)).selectExpr("pow(prediction - value, 2) loss").collect()
    ]
    assert sum(losses) / len(losses) < 2 * history[-1]["loss"]


@pytest.mark.night
@pytest.mark.timeout(300)
def test_after_a_lost_executor_the_run_goes_on(cluster: SparkSession, tmp_path: Path) -> None:
    df = frame(cluster)
    with pytest.raises(ValueError, match="store is missing: run_id='lost' resumes from checkpoints"):
        estimator(run_id="lost").fit(df)
    made = estimator(
        store=Store.create(tmp_path / "store"),
        run_id="lost",
        epochs=4,
        callbacks=[KillsItsExecutor(str(tmp_path / "killed"))],
    )
    with pytest.raises(ExecutorLostError, match=r"fit again with run_id='lost' to resume from it"):
        made.fit(df)
    fitted = made.fit(df)
    assert [row["epoch"] for row in fitted.getHistory()] == [1, 2, 3, 4]
    same(fitted.getModel(), reference(mse, epochs=4))


@pytest.mark.night
@pytest.mark.timeout(300)
def test_a_fit_goes_on_with_fewer_ranks_where_the_cluster_has_shrunk(cluster: SparkSession, tmp_path: Path) -> None:
    backend = SparkBackend(2, spark=cluster, verbose=0, max_restarts=1, min_num_proc=1, start_timeout=20.0)
    limit_executors(cluster, 1)  # none returns
    try:
        fitted = estimator(
            num_proc=None,
            backend=backend,
            store=Store.create(tmp_path / "store"),
            epochs=4,
            callbacks=[KillsItsExecutor(str(tmp_path / "killed"))],
        ).fit(frame(cluster))
    finally:
        limit_executors(cluster, 2)
    history = fitted.getHistory()
    assert [(row["epoch"], row.get("restarts", 0)) for row in history] == [(1, 0), (2, 0), (3, 1), (4, 1)]
    assert [row["lr"] for row in history] == pytest.approx([0.1, 0.1, 0.05, 0.05])
    assert history[-1]["loss"] < history[1]["loss"]


@pytest.mark.slow
def test_a_model_larger_than_what_spark_can_collect_comes_back(
    cluster: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spark_hvd.runner.spark.session.max_result_bytes", lambda spark: 1024)
    fitted = estimator(epochs=1).fit(frame(cluster))
    monkeypatch.undo()
    same(fitted.getModel(), estimator(epochs=1).fit(frame(cluster)).getModel().state_dict())


@pytest.mark.slow
def test_a_worker_that_is_killed_while_it_loads(cluster: SparkSession) -> None:
    """Spark tries again, unlike on one machine, and the next attempt on the same executor knows why."""

    def load() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    predicted = spark_hvd.predict(cluster.range(0, 10, 1, 1), load, columns="id", outputs="float")
    wanted = r"ModelError: the Python worker that this task had in its attempt \d was killed on \S+ while it loaded"
    texts = []
    # Spark may give the last of four attempts, which alone it tells of, to the executor that has had none.
    for _ in range(5):
        with pytest.raises(Exception, match="Python worker") as caught:
            predicted.collect()
        texts.append(str(caught.value))
        if re.search(rf"{wanted}.*spark\.executor\.memoryOverhead", texts[-1]):
            return
    raise AssertionError(texts)
