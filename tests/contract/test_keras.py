"""spark_hvd.keras on real ranks, torch backend: each case on two processes."""

from __future__ import annotations

import importlib.util
import inspect
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import cloudpickle
import numpy as np
import pytest

from tests import ranks
from tests.contract import keras_cases, keras_step_cases
from tests.contract.optimizer_ranks import Ranks
from tests.elastic_ranks import elastic_job

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("keras") is None, reason="needs keras"),
]

CASES = [
    case
    for case in vars(keras_cases).values()
    if inspect.isfunction(case) and list(inspect.signature(case).parameters) == ["rank", "size"]
    if case is not keras_cases.on_tensorflow
]
STEPS_BY_HAND = [
    keras_step_cases.two_optimizers,
    keras_step_cases.two_backwards_and_one_step,
    keras_step_cases.gradients_leave_during_backward,
    keras_step_cases.hooks_of_the_program_change_gradients,
    keras_step_cases.what_apply_is_given_is_reduced,
    keras_step_cases.gradients_in_parts_and_steps_broken_off,
    keras_step_cases.a_step_that_one_rank_breaks_off,
    keras_step_cases.a_step_broken_off_when_gradients_have_left,
    keras_step_cases.ranks_that_agree_end_a_fit_together,
    keras_step_cases.what_cannot_be_compiled,
]


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    ranks = Ranks(2, preload=("keras",))
    yield ranks
    ranks.close()


@pytest.mark.parametrize("case", CASES + STEPS_BY_HAND, ids=lambda case: case.__name__)
def test_two_ranks(two: Ranks, case: keras_cases.Case) -> None:
    two.run(case)


def test_before_init_a_batch_is_normalized_by_itself() -> None:
    """So an estimator can try a model on the driver."""

    def fn() -> list[Any]:
        import keras

        import spark_hvd.keras as hvd

        rows = np.arange(12.0, dtype="float32").reshape(4, 3) ** 2
        layers = hvd.SyncBatchNormalization(), keras.layers.BatchNormalization()
        return [keras.ops.convert_to_numpy(layer(rows, training=True)).tolist() for layer in layers]

    rank = ranks.Ranks(1, join=False, preload=("keras",))
    try:
        ((found, wanted),) = rank.run(fn)
    finally:
        rank.close()
    assert found == wanted


ON_TENSORFLOW = [
    keras_step_cases.what_cannot_be_compiled,
    *(case for case in CASES if case is not keras_cases.a_layer_that_one_rank_does_not_use),  # of torch's backward
]
AT_NIGHT = {
    keras_cases.a_saved_model_loads_without_us,
    keras_cases.wrong_ways_round,
    keras_cases.rates_and_momentum,
    keras_cases.a_model_is_loaded_with_its_optimizer,
}
"""Cases that are the same on both backends, and compile models for seconds on TensorFlow."""


@pytest.mark.timeout(900)
@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="needs tensorflow")
@pytest.mark.parametrize("at_night", [False, pytest.param(True, marks=pytest.mark.night)])
def test_two_ranks_on_tensorflow(at_night: bool) -> None:
    ranks = Ranks(2, preload=("tests.on_tensorflow",))
    try:
        for case in [keras_cases.on_tensorflow, *ON_TENSORFLOW]:
            if at_night or case not in AT_NIGHT:
                ranks.run(case)
    finally:
        ranks.close()


def train(victim: int | None, backend: str = "torch") -> dict[str, Any]:
    """Train with blocks of rows that do not depend on the number of ranks; `victim` dies once, during an epoch."""
    os.environ["KERAS_BACKEND"] = backend
    import keras

    import spark_hvd.keras as hvd

    process, call = os.getpid(), hvd.elastic
    random.seed(hvd.rank())
    layers = [keras.layers.Input((3,)), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.05)), "mse")
    state = call.KerasState(model, epoch=0, batch=0)
    x = np.random.default_rng(1).normal(size=(48, 3)).astype("float32")

    def die(batch: int, logs: Any) -> None:
        if victim == hvd.rank() and hvd.generation() == 0 and (state.epoch, state.batch) == (1, 5):
            os.kill(process, signal.SIGKILL)

    @call.run
    def fit(state: Any) -> None:
        while state.epoch < 3:
            rows = x[8 * state.batch :].reshape(-1, hvd.size(), 8 // hvd.size(), 3)[:, hvd.rank()].reshape(-1, 3)
            model.fit(
                rows,
                rows.sum(axis=1),
                batch_size=8 // hvd.size(),
                initial_epoch=state.epoch,
                epochs=state.epoch + 1,
                shuffle=False,
                verbose=0,
                callbacks=[
                    keras.callbacks.LambdaCallback(on_train_batch_begin=die),
                    call.UpdateBatchStateCallback(state),
                    call.UpdateEpochStateCallback(state),
                    call.CommitStateCallback(state, batches_per_commit=2),
                ],
            )

    fit(state)
    return {
        "weights": [weight.tobytes() for weight in model.get_weights()],
        "place": (state.epoch, state.batch),
        "steps": int(np.array(model.optimizer.iterations)),
    }


@pytest.mark.parametrize("backend", ["torch", pytest.param("tensorflow", marks=pytest.mark.night)])
def test_a_lost_rank_is_replaced_without_a_trace(backend: str) -> None:
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"needs {backend}")
    preload = ("keras",) if backend == "torch" else ("tests.on_tensorflow",)
    with elastic_job(train, None, backend, count=2, preload=preload) as job:
        job.form(job.ranks)
        expected = job.finish(job.ranks)
    assert expected[0]["steps"] == 3 * 6
    with elastic_job(train, 1, backend, count=2, preload=preload) as job:
        fresh = job.start()
        job.form(job.ranks[:2])
        job.ranks[1].await_end()
        members = [job.ranks[0], *fresh]
        job.form(members)
        results = job.finish(members)
    assert results == expected == [expected[0]] * 2


def test_another_backend_is_refused_by_name() -> None:
    environment = {**os.environ, "KERAS_BACKEND": "jax"}
    done = subprocess.run(
        [sys.executable, "-c", "import spark_hvd.keras"], env=environment, capture_output=True, text=True
    )
    assert "KERAS_BACKEND=jax: spark_hvd.keras supports torch" in done.stderr
