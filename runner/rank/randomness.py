"""Random state of a rank: every rank draws its own numbers, others in each run, unless the run was given a seed.

A rank is forked, and would go on with the generators of the process it is forked from: the same on all ranks, and the
same again in the next run.
"""

from __future__ import annotations

import hashlib
import importlib
import random
import secrets
import sys
from collections.abc import Callable
from typing import Any


class RandomState:
    """Seeds of this process's libraries.

    Args:
        seed: The run's; None for a state that nothing else has.
        stream: Which of the seed's streams: no other rank of the run has had it.
    """

    def __init__(self, seed: int | None, stream: int) -> None:
        self._root = secrets.token_bytes(32) if seed is None else f"{seed}/{stream}".encode()
        self._seeded: set[str] = set()

    def start(self) -> None:
        """Seed Python's generator, and those of the libraries imported so far. What was seeded before is left alone."""
        for name, seed in _SEEDERS.items():
            if name in sys.modules and name not in self._seeded:
                seed(importlib.import_module(name), hashlib.sha256(self._root + b"/" + name.encode()).digest())
                self._seeded.add(name)


def _numpy(numpy: Any, drawn: bytes) -> None:
    numpy.random.seed([int.from_bytes(drawn[at : at + 4], "big") for at in range(0, len(drawn), 4)])


def _torch(torch: Any, drawn: bytes) -> None:
    torch.manual_seed(
        int.from_bytes(drawn[:8], "big") >> 1
    )  # CUDA, which has not been started, takes it over when it is


def _tensorflow(tensorflow: Any, drawn: bytes) -> None:
    tensorflow.random.set_seed(int.from_bytes(drawn[:4], "big") >> 1)


_SEEDERS: dict[str, Callable[[Any, bytes], None]] = {
    "random": lambda _, drawn: random.seed(drawn),  # Keras draws the seeds of its layers from it
    "numpy": _numpy,
    "torch": _torch,
    "tensorflow": _tensorflow,
}
