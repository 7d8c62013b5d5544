"""Tests on a real GPU: one device is enough, and two or more cores. `pytest -m gpu tests/gpu`.

SPARK_HVD_TEST_DEVICE=cpu runs them with the CPU in the GPU's place: that finds slips in the tests, and proves nothing
of CUDA.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

DEVICE = os.environ.get("SPARK_HVD_TEST_DEVICE", "cuda")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = pytest.mark.skip(reason="torch sees no CUDA device")
    for item in items:
        if Path(__file__).parent in item.path.parents:  # not tests/gpu_sim, which needs no device
            item.add_marker(pytest.mark.gpu)
            if DEVICE == "cuda" and not torch.cuda.is_available():
                item.add_marker(missing)


@pytest.fixture(scope="session")
def device() -> str:
    """The kind of device under test."""
    return DEVICE


@pytest.fixture
def two_devices(device: str) -> str:
    """The kind of device, where every one of two ranks can have its own."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    return device


ONE_DEVICE = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
"""For ranks that are to share a GPU, however many there are."""
