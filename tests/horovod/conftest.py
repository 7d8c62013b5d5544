"""Worlds of two and three ranks, and of one rank per GPU for up to two; each serves the whole folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.horovod.support import LastingWorld, lasting


@pytest.fixture(scope="package")
def two() -> Iterator[LastingWorld]:
    with lasting(2) as world:
        yield world


@pytest.fixture(scope="package")
def three() -> Iterator[LastingWorld]:
    with lasting(3) as world:
        yield world


@pytest.fixture(scope="package")
def gpus() -> Iterator[LastingWorld]:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    with lasting(min(2, torch.cuda.device_count())) as world:
        yield world
