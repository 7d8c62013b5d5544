"""What a rank's loss counts for, so that the mean over ranks is the loss of the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch

import spark_hvd.torch as hvd
from spark_hvd.estimators.torch.weighted import LossReduction


class Shares:
    """By what a rank's losses of a batch are multiplied before gradients are averaged over ranks.

    A loss that is a mean over rows counts by this rank's rows, and all ranks know those of all beforehand. A mean that
    leaves labels out or weighs classes counts by what it divides by, which ranks add up in one small exchange. A sum
    is as it is on one rank: ranks' sums add up.

    Args:
        losses: One for each label.
        lowest: The lowest number of each label on any rank; None where that is not known. Where it is above the one
            that a loss ignores, as 0 is above -100, no label is left out, and ranks need not ask each other.
        seen: The reduction of each, if it was seen; that is believed more than what the loss says.
        counted: Whether a batch may have fewer rows than planned, because some cannot be read.

    Attributes:
        weight: That of a row of the last batch.
    """

    def __init__(
        self,
        losses: Sequence[Callable[..., Any]],
        lowest: Sequence[float | None],
        seen: Sequence[str | None] = (),
        counted: bool = False,
    ) -> None:
        told = [LossReduction.of(loss) for loss in losses]
        self._losses = [replace(one, kind=kind or one.kind) for one, kind in zip_longest(told, seen)]
        self._lowest = list(lowest)
        self._counted, self.weight = counted, 1.0

    @property
    def counts(self) -> bool:
        """Whether it may take more than the rows that are planned to know what a loss counts for."""
        return self._counted or any(loss.by_class and loss.kind == "mean" for loss in self._losses)

    def part(self, labels: Sequence[torch.Tensor], rows: int) -> torch.Tensor | None:
        """This rank's share of what each loss of all ranks divides by, after that of the rows; None where rows say it.

        Args:
            labels: Of this rank.
            rows: How many of its rows came.
        """
        divisors = [_divisor_of(*each) for each in zip(self._losses, self._lowest, labels, strict=True)]
        if not self._counted and divisors == [None] * len(divisors):
            return None
        mine = [float(rows), *(float(rows) if divisor is None else divisor for divisor in divisors)]
        return torch.tensor(mine, dtype=torch.float64)

    def of(self, labels: Sequence[torch.Tensor], rows: int, weight: float) -> list[float]:
        """The factor of each loss. Where ranks have to ask each other, all are to call it.

        Weights of rows change nothing here: a weighted loss divides by what it divides by without them.

        Args:
            labels: Of this rank.
            rows: How many of its rows came.
            weight: That of a row, see :class:`~spark_hvd.data.readers.feed.Feed`.
        """
        size = hvd.size()
        if size == 1:
            return [1.0] * len(self._losses)
        mine = self.part(labels, rows)
        total = None if mine is None else hvd.allreduce(mine, op=hvd.Sum, name="spark_hvd.share")
        return self.factors(mine, total, size, weight)

    def factors(self, mine: torch.Tensor | None, total: torch.Tensor | None, size: int, weight: float) -> list[float]:
        """The same, where it is known what the :meth:`part` of a rank is, and the sum of those of all ``size``."""
        self.weight, shares = weight, [weight] * len(self._losses)
        if mine is not None and total is not None:
            self.weight, *shares = (
                own * size / every if every else 1.0 for own, every in zip(mine.tolist(), total.tolist(), strict=True)
            )
        return [float(size) if loss.kind == "sum" else share for loss, share in zip(self._losses, shares, strict=True)]


def _divisor_of(reduction: LossReduction, lowest: float | None, label: torch.Tensor) -> float | None:
    """What a loss that is no mean over rows divides by; None for one that is."""
    if not reduction.by_class or reduction.kind != "mean" or label.is_floating_point():
        return None
    leaves_out = reduction.ignored is not None and (lowest is None or lowest <= reduction.ignored)
    return reduction.divisor(label) if leaves_out or reduction.weight is not None else None
