"""What the tests of small calls share."""

from __future__ import annotations

import sys
from typing import Any

import cloudpickle
import torch

import spark_hvd.torch as hvd
from spark_hvd.collectives.pending import rounds
from spark_hvd.collectives.process_set import queue_of

cloudpickle.register_pickle_by_value(sys.modules[__name__])

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64]
LEARNT = 3
"""Number of calls of a name after which the next goes through memory."""


def learn(*names: str, elements: int = 1, **how: Any) -> None:
    for _ in range(LEARNT):
        for name in names:
            hvd.allreduce(torch.ones(elements), name=name, **how)


def wait_in_memory(seconds: float) -> None:
    """Wait longer in memory, for late ranks; much longer if the path is checked, as a busy machine delays all."""
    rounds.MEMORY_SECONDS = seconds


def by_coordinator(process_set: hvd.ProcessSet | None = None) -> int:
    """Return how many batches the coordinator has decided on so far."""
    return queue_of(process_set or hvd.global_process_set).done


def total(factor: float = 1.0) -> float:
    return factor * sum(range(1, hvd.size() + 1))


def mine(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, hvd.rank() + 1, dtype=dtype)
