"""The summary of a run: how much, how fast, where the time went, and what went wrong."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from spark_hvd.runner.terminal import harmless
from spark_hvd.runner.watch import words
from spark_hvd.runner.watch.cost import Cost
from spark_hvd.runner.watch.rates import SEEN, SHARES, Rates
from spark_hvd.runner.watch.snapshot import Slowest
from spark_hvd.world.words import count

_CELL = "text-align:left;padding:1px 8px"
_LONG = 30.0
"""Minimum seconds of a run without steps for which the summary is shown."""


@dataclass(frozen=True, slots=True)
class Share:
    """A share of the ranks' time, from 0 to 1.

    Attributes:
        mean: Mean over all ranks.
        most: Share of the rank with the largest one.
        rank: That rank.
    """

    mean: float
    most: float
    rank: int


@dataclass(frozen=True)
class Summary:
    """The summary of a run. Prints as a short block of text, and as a table in a notebook. Unknown values are None.

    Shares cover the time of each rank between its first and last step, which excludes imports and the slow first step.
    Without `hvd.progress`, they cover all of its time.

    Attributes:
        title: What ran.
        seconds: From the start to the end.
        ranks: Number of ranks in the last world.
        steps: Steps of one rank, including repeated ones; without `hvd.progress`, those of its optimizer.
        samples: Samples of all ranks.
        samples_per_second: Samples divided by `seconds`.
        steady_samples_per_second: The same between the first and the last step.
        data: Share of the time waiting for data.
        communication: Share of the time waiting for communication by `spark_hvd`'s own collectives and optimizers. None
            if it is less than half a percent, as with DDP, whose collectives are torch's.
        compute: The remaining share inside of `hvd.progress` loops.
        effective_training_time: Share of all ranks' time, from the start to the end, spent in steps that were not lost.
        lost_training_time: Share of this time spent in lost steps: those after the commit or checkpoint from which
            training continued.
        restarts: How often all ranks were restarted.
        changes: How often ranks joined or left while others stayed.
        metrics: Rank 0's last metrics, by name.
        slowest: The rank that the others waited for, if it stands out.
        cost: What the run used of its cluster, with estimates for other numbers of ranks.
    """

    title: str
    seconds: float
    ranks: int
    steps: int = 0
    samples: int = 0
    samples_per_second: float | None = None
    steady_samples_per_second: float | None = None
    data: Share | None = None
    communication: Share | None = None
    compute: Share | None = None
    effective_training_time: float | None = None
    lost_training_time: float | None = None
    restarts: int = 0
    changes: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    slowest: Slowest | None = None
    cost: Cost | None = None

    @property
    def efficiency(self) -> float | None:
        """Share of the ranks' time that was not spent waiting for data or communication, from 0 to 1."""
        if self.compute is None:
            return None
        return 1 - sum(share.mean for share in (self.data, self.communication) if share is not None)

    @property
    def worth_showing(self) -> bool:
        """Whether the summary says more than that the run happened."""
        priced = self.cost is not None and self.cost.price is not None
        return priced or self.steps > 0 or self.seconds >= _LONG or self.restarts + self.changes > 0

    def as_dict(self) -> dict[str, Any]:
        """Return the summary as plain data, including `efficiency`."""
        cost = None if self.cost is None else self.cost.as_dict()
        return {**asdict(self), "efficiency": self.efficiency, "cost": cost}

    def facts(self) -> list[tuple[str, str]]:
        """Return the lines of the summary, as pairs of a heading and a text."""
        pairs = [("time", self._time())]
        if self.samples_per_second is not None:
            pairs.append(("samples", self._samples()))
        if self.effective_training_time is not None:
            pairs.append(("ETT", self._effective()))
        for heading, share, what in (
            ("compute", self.compute, ""),
            ("data", self.data, " waiting"),
            ("communication", self.communication, " waiting"),
        ):
            if share is not None:
                pairs.append((heading, _with_worst(share, what)))
        if self.slowest is not None:
            pairs.append(("slowest", words.slowest(self.slowest)))
        if again := words.again(self.restarts, self.changes):
            pairs.append(("interrupted", again))
        if self.metrics:
            pairs.append(("metrics", words.metrics(self.metrics)))
        if self.cost is not None:
            waits = (self.data, self.communication)
            data, communication = (None if share is None else share.mean for share in waits)
            pairs.append(("cost", self.cost.text(data, communication)))
        return pairs

    def _time(self) -> str:
        steps = f", {count(self.steps, 'step')}" if self.steps else ""
        return f"{words.duration(self.seconds)} on {count(self.ranks, 'rank')}{steps}"

    def _samples(self) -> str:
        assert self.samples_per_second is not None
        text = f"{self.samples:,}, {words.number(self.samples_per_second)} a second"
        if self.steady_samples_per_second is not None:
            text += f" ({words.number(self.steady_samples_per_second)} without the start)"
        return text

    def _effective(self) -> str:
        assert self.effective_training_time is not None
        text = f"{words.share(self.effective_training_time)} of the ranks' time was effective training time"
        if self.lost_training_time:
            text += f", {words.share(self.lost_training_time)} went into steps that were lost"
        return text

    def __str__(self) -> str:
        pairs = self.facts()
        width = max(len(heading) for heading, _ in pairs)
        lines = [self.title, *(f"  {heading:<{width}}  {text}" for heading, text in pairs)]
        return harmless("\n".join(lines), colors=False)

    def _repr_html_(self) -> str:
        rows = "".join(
            f'<tr><td style="{_CELL};opacity:.65">{html.escape(heading)}</td>'
            f'<td style="{_CELL}">{html.escape(text)}</td></tr>'
            for heading, text in self.facts()
        )
        table = f'<table style="color:inherit"><tbody>{rows}</tbody></table>'
        return f"<div><b>{html.escape(self.title)}</b>{table}</div>"


def _with_worst(share: Share, what: str) -> str:
    text, worst = words.share(share.mean), words.share(share.most)
    return f"{text} of the time{what}" + ("" if worst == text else f" (rank {share.rank}: {worst})")


def mean_shares(parts: Sequence[tuple[int, float, Mapping[str, float | None]]]) -> dict[str, Share | None]:
    """Combine the ranks' shares, by name.

    ``parts`` has, for each process, its rank, its seconds, and its shares of these seconds.
    """
    found: dict[str, Share | None] = {}
    for name in SHARES:
        known = [(rank, seconds, part) for rank, seconds, named in parts if (part := named[name]) is not None]
        total = sum(seconds for _, seconds, _ in known)
        rank, _, most = max(known, key=lambda each: each[2], default=(0, 0.0, 0.0))
        if name == "communication" and most < SEEN:
            known = []
        found[name] = Share(sum(seconds * part for _, seconds, part in known) / total, most, rank) if known else None
    return found


def steady_rate(spans: Sequence[Rates], ranks: int) -> float | None:
    """Return the samples per second of all ranks between the first and the last step: a rank's mean times ``ranks``."""
    seconds = sum(span.seconds for span in spans)
    samples = sum(span.samples for span in spans)
    return samples / seconds * ranks if seconds > 0 and samples > 0 else None
