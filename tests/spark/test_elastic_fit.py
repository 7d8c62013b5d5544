"""Elastic fits whose ranks are killed: the others go on in memory, with each row used once an epoch."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import spark_hvd.torch as hvd
from spark_hvd.estimators import Callback, LocalBackend, Store, TrainState
from tests.spark.estimator_support import ROWS, estimator, frame, same
from tests.spark.test_fit_restarts import Writes, network, plain

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def df(spark: SparkSession) -> DataFrame:
    return frame(spark).cache()


class Dies(Callback):
    """Kills ranks: (generation, rank) -> the batch, counted over all epochs, after which."""

    def __init__(self, deaths: dict[tuple[int, int], int]) -> None:
        self.deaths = deaths

    def on_batch_end(self, state: TrainState) -> None:
        if state.global_step == self.deaths.get((hvd.generation(), state.rank)):
            os.kill(os.getpid(), signal.SIGKILL)


SETTINGS: dict[str, Any] = {
    "optimizer": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "lr_scheduler": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99),
    "lr_scheduler_interval": "step",
    "shuffle": True,
    "validation": 0.2,
    "epochs": 3,
    "commit_every": 2,
    "num_proc": None,
}


def test_killed_ranks_that_are_replaced_cost_nothing_but_time(df: DataFrame, tmp_path: Path) -> None:
    draw = random.Random(20)
    deaths = {(number, draw.randrange(2)): draw.randrange(6 * number + 1, 6 * number + 7) for number in range(3)}
    settings = {**SETTINGS, "backend": LocalBackend(2, max_num_proc=2, verbose=0), "store": Store.create(tmp_path)}
    whole = estimator(network(), **settings).fit(df)
    again = estimator(network(), **settings, callbacks=[Dies(deaths)]).fit(df)
    same(again.getModel(), dict(whole.getModel().state_dict()), 1e-30)
    assert plain(again.getHistory()) == plain(whole.getHistory())
