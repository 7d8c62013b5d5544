"""Computes the cost of a run, and estimates it for other numbers of ranks."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from spark_hvd.runner.watch import words
from spark_hvd.world.words import count

_LEAST = 0.5
"""Minimum share of the time spent in steps for estimates with other numbers of ranks; a short run is mostly start."""
_WORTH = 0.9
"""More ranks do not help if twice as many would still take more than this share of the time."""


@dataclass(frozen=True, slots=True)
class Cost:
    """The resources that a run used, and the parts of its time that depend on the number of ranks.

    :meth:`seconds_with` assumes that the rows stay the same, so with more ranks, each rank's time for computing and
    waiting for data shrinks. Communication takes 2 (n - 1) / n times the time of its bytes, as in a ring. Everything
    else (the start, the end, time outside of `hvd.progress` loops) stays. The model ignores communication hidden behind
    backward, and networks between hosts that the run did not use.

    Attributes:
        seconds: From the start to the end.
        ranks: Number of ranks in the last world.
        rank_seconds: Seconds times ranks, summed over all worlds.
        gpu_seconds: The same for GPUs; 0 without any.
        divided: The part of `seconds` spent computing and waiting for data, on the rank that the others waited for;
            None if steps are unknown, or ranks joined or left.
        communication: The part of `seconds` spent waiting for communication on that rank. None if none was seen: a
            single rank has none, and torch's own (DDP, Lightning) is not counted.
        price_per_hour: Price of one rank, including its GPUs; None if not given.
    """

    seconds: float
    ranks: int
    rank_seconds: float
    gpu_seconds: float = 0.0
    divided: float | None = None
    communication: float | None = None
    price_per_hour: float | None = None

    @property
    def price(self) -> float | None:
        """The price of the run; None if no price per hour was given."""
        return self._price_of(self.rank_seconds)

    def seconds_with(self, ranks: float, *, same_steps: bool = True) -> float:
        """Estimate the seconds that the run would have taken with another number of ranks.

        If `communication` is None, the estimate is too low for more ranks, and too high for fewer.

        Args:
            ranks: At least 1; ``math.inf`` for the lower bound over all numbers of ranks.
            same_steps: Keep the global batch, and so the number of steps. False: each rank keeps its batch, so twice
                the ranks make half the steps.

        Raises:
            ValueError: `ranks` is below 1, or `divided` is unknown.
        """
        if not ranks >= 1:
            raise ValueError(f"ranks={ranks!r}: expected a number of ranks, at least 1")
        if self.divided is None:
            raise ValueError(
                "this run reported no steps, or ranks joined or left: expected a run of a fixed number of ranks that "
                "calls hvd.progress or steps a DistributedOptimizer"
            )
        measured = self.communication or 0.0
        part = self.ranks / ranks
        communication = measured * _ring(ranks) / _ring(self.ranks) if measured and self.ranks > 1 else 0.0
        fixed = max(0.0, self.seconds - self.divided - measured)
        return fixed + part * self.divided + (communication if same_steps else part * communication)

    def as_dict(self) -> dict[str, Any]:
        """Return the cost as plain data, including `price`."""
        return {**asdict(self), "price": self.price}

    def text(self, data: float | None = None, communication: float | None = None) -> str:
        """Describe the cost in one line.

        ``data`` and ``communication`` are the shares of the ranks' time spent waiting for them, if known.
        """
        spent = f"{words.number(self.rank_seconds)} rank-seconds"
        spent += f" and {words.number(self.gpu_seconds)} GPU-seconds" if self.gpu_seconds else ""
        if self.price is not None and self.price_per_hour is not None:
            spent += f" ({words.number(self.price)} at {words.number(self.price_per_hour)} an hour)"
        waits = (("data", data), ("communication", communication))
        if waited := [f"{words.share(part)} for {name}" for name, part in waits if part is not None]:
            spent += f", waiting {' and '.join(waited)}"
        if self.divided is None or self.divided + (self.communication or 0.0) < _LEAST * self.seconds:
            return spent
        parts = [spent, self._with(2 * self.ranks)]
        if self.ranks > 1:
            parts.append(self._with(self.ranks // 2))
        if self.communication is not None and self.seconds_with(2 * self.ranks) > _WORTH * self.seconds:
            parts.append(f"more ranks do not help below {words.duration(self.seconds_with(math.inf))}")
        return "; ".join(parts)

    def _with(self, ranks: int) -> str:
        seconds = self.seconds_with(ranks)
        sure = "about" if self.communication is not None else "at least" if ranks > self.ranks else "at most"
        price = self._price_of(ranks * seconds)
        if price is None:
            price_text = f"{words.number(ranks * seconds / self.rank_seconds)} x the cost"
        else:
            price_text = words.number(price)
        return f"{count(ranks, 'rank')}: {sure} {words.duration(seconds)} for {price_text}"

    def _price_of(self, rank_seconds: float) -> float | None:
        return None if self.price_per_hour is None else rank_seconds / 3600 * self.price_per_hour


def _ring(ranks: float) -> float:
    """Return the bytes that each rank sends in a ring all-reduce, divided by the bytes of the tensor."""
    return 2.0 * (1.0 - 1.0 / ranks)
