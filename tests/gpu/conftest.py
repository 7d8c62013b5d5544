"""Tests on a real GPU: one device and two cores are enough. `pytest -m gpu tests/gpu`.

SPARK_HVD_TEST_DEVICE=cpu runs them with the CPU in place of the GPU: that finds mistakes in the tests, and proves
nothing about CUDA.
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
    """Return the kind of device under test."""
    return DEVICE


@pytest.fixture
def two_devices(device: str) -> str:
    """Return the kind of device, if each of two ranks can have its own."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    return device


ONE_DEVICE = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
"""Variables for ranks that share a GPU, however many there are."""
