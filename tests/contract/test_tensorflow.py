"""spark_hvd.tensorflow on real ranks: each case on two processes."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Iterator

import cloudpickle
import pytest

from tests.contract import tensorflow_cases
from tests.contract.optimizer_ranks import Ranks

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="needs tensorflow")

CASES = [
    case
    for case in vars(tensorflow_cases).values()
    if inspect.isfunction(case) and list(inspect.signature(case).parameters) == ["rank", "size"]
]


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_two_ranks(two: Ranks, case: tensorflow_cases.Case) -> None:
    two.run(case)
