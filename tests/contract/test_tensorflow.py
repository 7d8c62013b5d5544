"""spark_hvd.tensorflow on real ranks: each case on two processes."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest

from spark_hvd import run_local
from tests.contract import tape_cases, tensorflow_cases
from tests.contract.optimizer_ranks import Ranks
from tests.elastic_ranks import elastic_job

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="needs tensorflow"),
]

CASES = [
    case
    for case in (*vars(tensorflow_cases).values(), *vars(tape_cases).values())
    if inspect.isfunction(case) and list(inspect.signature(case).parameters) == ["rank", "size"]
]
PRELOAD = ("tests.on_tensorflow",)


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    ranks = Ranks(2, 240, preload=PRELOAD)  # importing it takes half a minute on a busy machine
    yield ranks
    ranks.close()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_two_ranks(two: Ranks, case: tensorflow_cases.Case) -> None:
    two.run(case)


def train(victim: int | None) -> dict[str, Any]:
    """Train with blocks of rows that do not depend on the number of ranks; `victim` dies once, in the middle."""
    import tensorflow as tf

    import spark_hvd.tensorflow as hvd

    process, call, kill, number = os.getpid(), hvd.elastic, os.kill, signal.SIGKILL
    x = np.random.default_rng(1).normal(size=(6, 8, 3)).astype("float32")
    weights, velocity = tf.Variable(tf.fill((3, 1), float(hvd.rank()))), tf.Variable(tf.zeros((3, 1)))

    @tf.function
    def step(rows: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((rows @ weights - tf.reduce_sum(rows, 1, keepdims=True)) ** 2)
        (gradient,) = hvd.DistributedGradientTape(tape).gradient(loss, [weights])
        velocity.assign(0.5 * velocity + gradient)
        weights.assign_sub(0.1 * velocity)

    @call.run
    def fit(state: Any) -> None:
        while state.batch < 30:
            if victim == hvd.rank() and hvd.generation() == 0 and state.batch == 13:
                kill(process, number)
            step(tf.constant(x[state.batch % 6][hvd.rank() :: hvd.size()]))
            state.batch += 1
            if state.batch % 4 == 0:
                state.commit()

    state = call.TensorFlowState([weights, velocity], batch=0)
    fit(state)
    return {"weights": weights.numpy().tobytes(), "batch": state.batch}


@pytest.mark.timeout(300)
def test_a_lost_rank_is_replaced_without_a_trace() -> None:
    with elastic_job(train, None, count=2, preload=PRELOAD) as job:
        job.form(job.ranks)
        expected = job.finish(job.ranks)
    with elastic_job(train, 1, count=2, preload=PRELOAD) as job:
        fresh = job.start()
        job.form(job.ranks[:2])
        job.ranks[1].await_end()
        members = [job.ranks[0], *fresh]
        job.form(members)
        results = job.finish(members)
    assert results == expected == [expected[0]] * 2


def shares_of_threads() -> list[float]:
    """Return each thread's share of a rank's computation in TensorFlow, the busiest first."""
    import tensorflow as tf

    def ticks() -> dict[str, int]:
        files = Path("/proc/self/task").glob("*/stat")
        return {each.parent.name: sum(map(int, each.read_text().rpartition(")")[2].split()[11:13])) for each in files}

    matrix = tf.ones((1024, 1024))
    before = ticks()
    for _ in range(40):
        matrix = tf.tanh(matrix @ matrix)
    matrix.numpy()
    spent = [after - before.get(thread, 0) for thread, after in ticks().items()]
    return sorted((each / sum(spent) for each in spent), reverse=True)


def test_a_rank_of_a_run_is_told_how_many_threads_it_has() -> None:
    """As the next test but one shows, TensorFlow heeds these variables."""
    names = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
    told = run_local(lambda: [os.environ[name] for name in names], num_proc=1, env={"OMP_NUM_THREADS": "1"})
    assert told == [["1", "2"]]


@pytest.mark.night  # by day: the tests beside this one
@pytest.mark.parametrize(("threads", "alone"), [("1", True), ("2", False)])
def test_a_rank_computes_in_as_many_threads_as_it_has_cores(threads: str, alone: bool) -> None:
    (shares,) = run_local(shares_of_threads, num_proc=1, env={"OMP_NUM_THREADS": threads})
    assert (shares[0] > 0.95) is alone, shares


def told_of(threads: int | None) -> tuple[list[str], float]:
    """Return a process's warnings, and its busiest thread's share, if another launcher started it."""
    import logging

    import tensorflow as tf

    class Keeps(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())

    told: list[str] = []
    logging.getLogger("spark_hvd").addHandler(Keeps())
    if threads is not None:
        tf.config.threading.set_inter_op_parallelism_threads(threads)
    import spark_hvd.tensorflow  # noqa: F401

    return told, shares_of_threads()[0]


@pytest.mark.parametrize("threads", [None, 1, pytest.param(2, marks=pytest.mark.night)])
def test_so_does_one_that_others_have_launched(threads: int | None) -> None:
    """A process with one thread for all operations gets a warning."""
    with elastic_job(told_of, threads, count=1, preload=PRELOAD) as job:
        _, (told, share) = job.ranks[0].await_("value")
    assert any("one thread to run operations" in each for each in told) is (threads == 1)
    assert share > 0.95


def drawn(seed: int | None, streams: list[int]) -> list[float]:
    """What the ranks of a run with these streams draw first."""
    import tensorflow as tf

    from spark_hvd.runner.rank.process import RandomState

    found = []
    for stream in streams:
        RandomState(seed, stream).start()
        found.append(float(tf.random.uniform(())))
    return found


@pytest.mark.parametrize("seed", [7, None])
def test_ranks_draw_random_numbers_of_their_own(seed: int | None) -> None:
    with elastic_job(drawn, seed, [0, 1, 0], count=1, preload=PRELOAD) as job:
        _, (first, other, again) = job.ranks[0].await_("value")
    assert first != other
    assert (first == again) is (seed is not None)


def names_of_horovod() -> list[str]:
    """The modules of TensorFlow and Keras in the package ``horovod``, all of whose names have been asked for."""
    import spark_hvd.horovod  # noqa: F401
    from spark_hvd.horovod.names import TABLE

    found = [name for name in TABLE if "tensorflow" in name or "keras" in name]
    for name in found:
        module = importlib.import_module(name)
        for attribute in dir(module):
            getattr(module, attribute)
    return found


def test_every_name_of_horovod_is_found() -> None:
    with elastic_job(names_of_horovod, count=1, preload=PRELOAD) as job:
        _, found = job.ranks[0].await_("value")
    assert {"horovod.tensorflow", "horovod.keras", "horovod.tensorflow.keras"} <= {*found}
