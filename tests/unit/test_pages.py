"""Large results use huge pages if the kernel has them, and ordinary ones otherwise."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch

from spark_hvd.transport.host.pages import prefer_huge


def faults_of(numel: int) -> int:
    tensor = prefer_huge(torch.empty(numel))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensor.fill_(1.0)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_a_large_result_takes_few_pages() -> None:
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not enabled.exists() or "[never]" in enabled.read_text():
        pytest.skip("this kernel has no transparent huge pages")
    assert faults_of(16 << 20) < (64 << 20) // 4096 // 4


def test_contents_stay_whatever_the_size() -> None:
    for numel in (0, 1, (8 << 20) - 1, (8 << 20) + 1):
        tensor = torch.empty(numel)
        assert prefer_huge(tensor) is tensor
    assert prefer_huge(torch.ones(40 << 20, dtype=torch.uint8)[3:]).sum() == (40 << 20) - 3
