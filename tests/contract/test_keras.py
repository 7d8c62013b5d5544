"""spark_hvd.keras on real ranks, torch backend: each case on two processes."""

from __future__ import annotations

import importlib.util
import inspect
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.contract import keras_cases
from tests.contract.optimizer_ranks import Ranks

pytestmark = pytest.mark.skipif(importlib.util.find_spec("keras") is None, reason="needs keras")

CASES = [
    case
    for case in vars(keras_cases).values()
    if inspect.isfunction(case) and list(inspect.signature(case).parameters) == ["rank", "size"]
]


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_two_ranks(two: Ranks, case: keras_cases.Case) -> None:
    two.run(case)


def test_another_backend_is_refused_by_name() -> None:
    environment = {**os.environ, "KERAS_BACKEND": "jax"}
    done = subprocess.run(
        [sys.executable, "-c", "import spark_hvd.keras"], env=environment, capture_output=True, text=True
    )
    assert "KERAS_BACKEND=jax: spark_hvd.keras works with torch" in done.stderr
