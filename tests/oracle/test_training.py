"""n ranks on their rows compute the same as one process on all rows, whatever a user does between two steps.

Hypothesis generates the cases, the same in each run. `SPARK_HVD_NIGHT=20000` runs that many, different each time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from torch import nn

from tests.oracle.cases import Case, cases
from tests.oracle.training import ROWS, Training
from tests.ranks import SECONDS, Ranks

NIGHT = int(os.environ.get("SPARK_HVD_NIGHT", "0"))
PATIENCE = 10 * SECONDS if NIGHT else SECONDS
"""Time limit of a case in seconds: whole nights run while other work does."""
RENEWED_AFTER = 500
"""Maximum cases: process groups are never returned."""


class Worlds:
    """Ranks that live from case to case."""

    def __init__(self) -> None:
        self._worlds: dict[int, Ranks] = {}
        self._counts: dict[int, int] = {}

    def run(self, case: Case) -> list[tuple[bool, Any]]:
        """Return each rank's results; after a failure the next case gets new ranks."""
        size = case.ranks
        if size not in self._worlds:
            self._worlds[size], self._counts[size] = Ranks(size, timeout=PATIENCE), 0
        self._counts[size] += 1
        outcomes = self._worlds[size].outcomes(train, case)
        if self._counts[size] >= RENEWED_AFTER or not all(ok for ok, _ in outcomes):
            self._worlds.pop(size).close()
        return outcomes

    def close(self) -> None:
        """End them."""
        for world in self._worlds.values():
            world.close()


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    worlds = Worlds()
    yield worlds
    worlds.close()


def train(case: Case) -> dict[str, Any]:
    """Run one rank's part."""
    import spark_hvd.torch as hvd

    def distribute(optimizer: torch.optim.Optimizer) -> Any:
        return hvd.DistributedOptimizer(
            optimizer,
            op=hvd.Average if case.reduction == "mean" else hvd.Sum,
            backward_passes_per_step=case.passes,
            bucket_cap_mb=case.bucket_cap_mb,
            shared_memory=case.shared_memory,
        )

    return Training(case, hvd.rank(), distribute, hvd.SyncBatchNorm).run()


def alone(case: Case, order: torch.Tensor | None = None) -> dict[str, Any]:
    """One process on everybody's rows."""
    return Training(case, None, lambda optimizer: optimizer, nn.BatchNorm2d, order).run()


def check(worlds: Worlds, case: Case) -> None:
    """Train it both ways, and compare."""
    try:
        wanted = alone(case)
    except (RuntimeError, ValueError, TypeError, ArithmeticError, AssertionError):
        return  # plain torch does not do that either
    outcomes = worlds.run(case)
    failed = [f"rank {rank}:\n{text}" for rank, (ok, text) in enumerate(outcomes) if not ok]
    assert not failed, "\n".join(failed)
    try:
        _compare(case, [value for _, value in outcomes], wanted)
    except AssertionError:
        if case.optimizer != "LBFGS" or not decided_by_rounding(case, wanted):
            raise


def decided_by_rounding(case: Case, wanted: dict[str, Any]) -> bool:
    """Whether one process gives something else if it takes the same rows in another order.

    LBFGS' line search compares losses that may be equal but for rounding.
    """
    for seed in range(5):
        order = torch.randperm(case.ranks * ROWS, generator=torch.Generator().manual_seed(seed))
        try:
            _compare(case, [alone(case, order)], wanted)
        except AssertionError:
            return True
    return False


def _compare(case: Case, found: list[dict[str, Any]], wanted: dict[str, Any]) -> None:
    losses = torch.tensor([each["losses"] for each in found], dtype=torch.float64)
    together = losses.mean(0) if case.reduction == "mean" else losses.sum(0)
    _close("losses", together, torch.tensor(wanted["losses"], dtype=torch.float64))
    for rank, each in enumerate(found):
        _all_close(f"rank {rank}: weight", each["weights"], wanted["weights"])
        for number, (mine, theirs) in enumerate(zip(each["states"], wanted["states"], strict=True)):
            _all_close(f"rank {rank}: state of optimizer {number}:", mine, theirs)


def _all_close(what: str, found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys(), what
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, f"{what} {name}"
        _close(f"{what} {name}", found[name].double(), tensor.double())


def _close(what: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
    # Some of the cases diverge, for one process, too.
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4, equal_nan=True, msg=lambda text: f"{what}: {text}")


some = settings(
    max_examples=NIGHT or 300,
    derandomize=not NIGHT,
    database=None,
    deadline=None,
    # A failing case ends its ranks, so shrinking it takes minutes.
    phases=[Phase.generate, Phase.shrink] if NIGHT else [Phase.generate],
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.timeout(36_000 if NIGHT else 400)
@some
@given(cases(most_steps=5 if NIGHT else 3))
def test_as_one_process(worlds: Worlds, case: Case) -> None:
    check(worlds, case)
