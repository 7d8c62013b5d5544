"""What one process of a rank has told its driver, over all worlds that it was in; and its row in the table."""

from __future__ import annotations

from spark_hvd.runner.watch.rates import Rates, Recent, grown, rates, shares
from spark_hvd.runner.watch.snapshot import LONG, RankRow, Slowest
from spark_hvd.world.vitals import Vitals


class RankRecord:
    """See the module's description.

    Args:
        record: The first one that it sent.
        now: The monotonic clock.

    Attributes:
        start: Its first record with a step; as long as there is none, the first of all.
        end: The last one by which it had done another step; as long as there is none, the last of all.
        recent: The last seconds, in the newest world.
        heard: When the last one came.
        ended: Whether there is no more to come.
    """

    def __init__(self, record: Vitals, now: float) -> None:
        self.start = self.end = record
        self.recent = Recent(record)
        self.heard = now
        self.ended = False
        self._metrics = dict(record.metrics)

    @property
    def last(self) -> Vitals:
        """The newest record of the rank."""
        return self.recent.last

    @property
    def metrics(self) -> dict[str, float]:
        """By name, the loss first. A loop that begins has none yet: those of the one before are better than nothing."""
        named = self._metrics.items()
        return dict(sorted(named, key=lambda item: (item[0] != "loss", "loss" not in item[0].lower())))

    @property
    def steps(self) -> int:
        """Steps that the rank has done in this world."""
        return self.last.total_steps - self.last.steps_before

    @property
    def whole(self) -> Rates | None:
        """From its first step to its last; all there is to know of one that told of no steps."""
        return rates(grown(self.start, self.end))

    def take(self, record: Vitals, now: float) -> None:
        """Take the next record of the rank."""
        before = self.last
        if record.total_steps and not self.start.total_steps:
            self.start = self.end = record
        if record.total_steps > before.total_steps or not record.total_steps:
            self.end = record
        self.recent.take(record)
        self._metrics.update(record.metrics)
        self.heard = now

    def enter(self, record: Vitals, now: float) -> None:
        """Note the first one that it sent in another world."""
        self.ended = False
        self.take(record, now)
        self.recent = Recent(record)

    def row(self, rank: int, now: float, slowest: Slowest | None) -> RankRow:
        """What there is to see of it now.

        Args:
            rank: Its number in the newest world.
            now: The monotonic clock.
            slowest: Of all ranks, if one of them is to be marked.
        """
        last, done = self.last, self.recent.done()
        pace = done if self.recent.paced else None
        silent = now - self.heard
        return RankRow(
            rank=rank,
            silent=silent if silent > LONG and not self.ended else None,
            started=True,
            ended=self.ended,
            stage=last.stage,
            epoch=last.epoch,
            epochs=last.epochs,
            step=last.step,
            steps=last.steps,
            steps_per_second=None if pace is None else pace.steps_per_second,
            samples_per_second=None if pace is None or not last.samples else pace.samples_per_second,
            **shares(done, last),
            cpu=self.recent.cpu(),
            memory_bytes=last.memory_bytes,
            gpu_memory_bytes=last.gpu_memory_bytes,
            gpu_utilization=last.gpu_utilization,
            metrics=self.metrics,
            waits="" if self.ended else _waits(last),
            skew=slowest.skew if slowest is not None and slowest.rank == rank else None,
        )


def _waits(record: Vitals) -> str:
    if record.fetching is not None and record.fetching > LONG:
        return f"waits for a batch for {record.fetching:.0f} s"
    if record.underway and record.underway[0].seconds > LONG:
        return f"in {record.underway[0].name} for {record.underway[0].seconds:.0f} s"
    return ""
