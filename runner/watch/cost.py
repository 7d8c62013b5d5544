"""What a run has cost, and what it would have cost with other numbers of ranks."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from spark_hvd.runner.watch import words
from spark_hvd.world.words import count

_LEAST = 0.5
"""Other numbers of ranks are left out where steps were less of the run: of a short one the start is most."""
_WORTH = 0.9
"""More ranks do not help where twice as many would leave more than this part of the time."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What a run has taken of its cluster, and where the time went that other numbers of ranks would change.

    The model of :meth:`seconds_with`: the same rows, so a rank's share of the computing and of the waiting for data
    shrinks as ranks become more; communication takes a ring's 2 (n - 1) / n times what its bytes take; all else (the
    start, the end, what is outside of `hvd.progress` loops) stays. It knows nothing of communication that is hidden
    behind a backward pass, nor of the network between hosts that the run did not have.

    Attributes:
        seconds: From the start to the end.
        ranks: In the last world.
        rank_seconds: Seconds times ranks, added up over all worlds.
        gpu_seconds: The same for GPUs; 0 without any.
        divided: Of `seconds`, computing and waiting for data, on the rank for which the others waited; None where
            nothing is known of steps, or ranks came and went.
        communication: Of `seconds`, waiting for communication on that rank; None where none was seen: one rank has
            none, and torch's own (DDP, Lightning) is not counted.
        price_per_hour: Of one rank, its GPUs included; None where it was not told.
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
        """What the run has cost; None where the price of an hour was not told."""
        return self._price_of(self.rank_seconds)

    def seconds_with(self, ranks: float, *, same_steps: bool = True) -> float:
        """How long the run would have taken with another number of ranks.

        Where `communication` is None this is too little for more ranks, and too much for fewer.

        Args:
            ranks: At least 1; ``math.inf`` for the time that no number of ranks gets below.
            same_steps: Whether the batch of all ranks together stays as it is, and so the number of steps. False: each
                rank keeps its batch, so that twice the ranks make half the steps.

        Raises:
            ValueError: `ranks` is below 1, or nothing is known of steps.
        """
        if not ranks >= 1:
            raise ValueError(f"ranks={ranks!r}: expected a number of ranks, at least 1")
        if self.divided is None:
            raise ValueError(
                "nothing is known of this run's steps, or its ranks came and went: expected a run of a fixed number of "
                "ranks that calls hvd.progress or steps a DistributedOptimizer"
            )
        talked = self.communication or 0.0
        part = self.ranks / ranks
        again = talked * _ring(ranks) / _ring(self.ranks) if talked and self.ranks > 1 else 0.0
        fixed = max(0.0, self.seconds - self.divided - talked)
        return fixed + part * self.divided + (again if same_steps else part * again)

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain data, `price` included."""
        return {**asdict(self), "price": self.price}

    def text(self, data: float | None = None, communication: float | None = None) -> str:
        """All of it in one line.

        ``data`` and ``communication`` are the shares of the ranks' time that waited for these, where they are known.
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
    """How many times its bytes each rank sends in a ring all-reduce."""
    return 2.0 * (1.0 - 1.0 / ranks)
