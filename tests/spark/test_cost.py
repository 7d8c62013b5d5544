"""A real run on Spark reports at its end what it has cost, and what other numbers of ranks would have cost."""

from __future__ import annotations

import re
import sys
import time

import cloudpickle
import pytest
import torch
from pyspark.sql import SparkSession

import spark_hvd
import spark_hvd.torch as hvd

pytestmark = pytest.mark.usefixtures("no_leaks")
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def train(steps: int) -> None:
    model = torch.nn.Linear(4, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    for _ in range(steps):
        time.sleep(0.04 if hvd.rank() else 0.02)  # the other rank waits for rank 1
        optimizer.zero_grad()
        model(torch.ones(8, 4)).sum().backward()
        optimizer.step()


@pytest.mark.slow  # by day: the next test, and tests/unit/test_cost.py
def test_the_line_at_the_end(spark: SparkSession, capsys: pytest.CaptureFixture[str]) -> None:
    result = spark_hvd.run(train, [60], num_proc=2, reporting=spark_hvd.Reporting(price_per_hour=3.6, progress="plain"))
    assert result.summary is not None
    cost = result.summary.cost
    assert cost is not None
    assert cost.rank_seconds == pytest.approx(2 * result.summary.seconds)
    assert cost.price == pytest.approx(cost.rank_seconds / 1000)
    (line,) = re.findall(r"^.*  cost  .*$", capsys.readouterr().err, re.MULTILINE)
    assert "rank-seconds" in line
    assert "at 3.60 an hour" in line
    assert re.search(r"waiting \d+ % for communication", line)
    assert cost.divided is not None
    assert cost.divided >= 0.9 * 60 * 0.04  # rank 1's
    with pytest.raises(ValueError, match=r"price_per_hour=-1: expected a number above 0, or None for no price"):
        spark_hvd.run(train, [1], num_proc=2, reporting=spark_hvd.Reporting(price_per_hour=-1))


def test_without_steps_it_says_what_was_spent(spark: SparkSession) -> None:
    result = spark_hvd.run(hvd.rank, num_proc=2, verbose=0)
    assert result.summary is not None
    assert re.fullmatch(r"[\d.,]+ rank-seconds", dict(result.summary.facts())["cost"])
