"""TensorFlow's tape, and Keras on TensorFlow, on two ranks equal one process with the rows of both.

Hypothesis generates the cases, the same in each run. `SPARK_HVD_NIGHT=5000` tries a fiftieth as many.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator

import cloudpickle
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.oracle import taping
from tests.oracle.taping import RANKS, TapeCase, tape_cases, trained
from tests.ranks import Ranks

for module in (sys.modules[__name__], taping):
    cloudpickle.register_pickle_by_value(module)
NIGHT = int(os.environ.get("SPARK_HVD_NIGHT", "0"))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="needs tensorflow"),
    pytest.mark.timeout(36_000 if NIGHT else 900),
]


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    ranks = Ranks(RANKS, timeout=300, preload=("tests.on_tensorflow",))  # it is slow on a busy machine
    yield ranks
    ranks.close()


def both(case: TapeCase) -> None:
    """Train on this rank's rows, and in one process on all rows: the weights must agree."""
    os.environ["KERAS_BACKEND"] = "tensorflow"
    import spark_hvd.torch as hvd

    for mine, its in zip(trained(case, hvd.rank()), trained(case, None), strict=True):
        np.testing.assert_allclose(mine, its, rtol=2e-3, atol=2e-4, err_msg=f"rank {hvd.rank()}: {case}")


@settings(
    max_examples=-(-NIGHT // 50) or 8,
    derandomize=not NIGHT,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(case=tape_cases)
def test_as_one_process(two: Ranks, case: TapeCase) -> None:
    two.run(both, case)
