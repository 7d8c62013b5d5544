"""The driver's view of a run, made from the ranks' records and read by the displays."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import replace

from spark_hvd.runner.watch.cost import Cost
from spark_hvd.runner.watch.rates import SEEN, Pace, Rates, Recent, grown, rates, shares, slowest_of
from spark_hvd.runner.watch.snapshot import LONG, RankRow, RunSnapshot, Slowest
from spark_hvd.runner.watch.summary import Summary, mean_shares, steady_rate
from spark_hvd.world.vitals import Vitals


class RankRecord:
    """The records of one process of a rank, over all its worlds, and its row in the table.

    Attributes:
        start: Its first record with a step; before that, its first record.
        end: The last record with a new step; before the first step, the last record.
        recent: The last seconds, in the newest world.
        heard: Time of the last record.
        ended: Whether no more records will come.
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
        """By name, the loss first. A new loop has no metrics yet, and shows those of the previous one."""
        named = self._metrics.items()
        return dict(sorted(named, key=lambda item: (item[0] != "loss", "loss" not in item[0].lower())))

    @property
    def steps(self) -> int:
        """Number of steps that the rank has done in this world."""
        return self.last.total_steps - self.last.steps_before

    @property
    def whole(self) -> Rates | None:
        """The rates from the first step to the last; without steps, over all records."""
        return rates(grown(self.start, self.end))

    def worked(self, lost_after: int | None) -> tuple[float, float]:
        """Return the seconds in steps that count, and in lost steps: undone ones, and those after ``lost_after``."""
        last = self.last
        if not last.total_steps:
            return 0.0, 0.0
        seconds = last.watched_seconds if last.stage else self.end.clock - self.start.clock
        lost = last.lost_steps + (0 if lost_after is None else max(0, last.total_steps - lost_after))
        part = seconds * min(1.0, lost / last.total_steps)
        return seconds - part, part

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
        """Take the first record of the rank in another world."""
        self.ended = False
        self.take(record, now)
        self.recent = Recent(record)

    def row(self, rank: int, now: float, slowest: Slowest | None) -> RankRow:
        """Return the rank's row in the table."""
        last, done = self.last, self.recent.done()
        pace = done if self.recent.paced else None
        silent = now - self.heard
        return RankRow(
            rank=rank,
            silent=silent if silent > LONG and not self.ended else None,
            started=True,
            ended=self.ended,
            host=last.host,
            pid=last.pid,
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
    if record.pending and record.pending[0].seconds > LONG:
        return f"in {record.pending[0].name} for {record.pending[0].seconds:.0f} s"
    return ""


class RunView:
    """Takes the ranks' records; makes snapshots, and a summary at the end. Does no I/O and reads no clock.

    **The slowest rank.** Ranks that train together make the same number of steps per second, because they wait for each
    other. The rank that the others wait for waits least. Ranks are therefore compared by their own time per step,
    without waiting for communication. The skew is the slowest rank's time divided by the median rank's. It is shown
    from 1.1 on, if the others wait for at least 5 % of a step because of it, and after 4 seconds and 3 steps of each.

    **Worlds.** Ranks of a newer generation replace earlier ones. The work of a process counts once, even if its rank
    changes.

    ``now`` is on the monotonic clock. ``price_per_hour`` is that of one rank, None if unknown. ``gpus_per_rank`` is
    None for one GPU per rank, if ranks report any.
    """

    def __init__(
        self, title: str, size: int, now: float, price_per_hour: float | None = None, gpus_per_rank: int | None = None
    ) -> None:
        self.title = title
        self._size = size
        self._started = now
        self._price_per_hour, self._gpus_per_rank = price_per_hour, gpus_per_rank
        self._sized, self._rank_seconds = now, 0.0
        """Start of the current number of ranks, and rank-seconds before that."""
        self._generation = -1
        self._ranks: dict[int, RankRecord] = {}
        self._before: dict[str, RankRecord] = {}
        """Processes of the previous world that have not reported in this one."""
        self._all: list[RankRecord] = []
        self._steps_before = self._steps_of_last = 0
        """Steps in the worlds before the previous one, and in the previous one, to whose end survivors refer."""
        self._survivors: list[int] = []
        """For each world but the first, the number of processes that it took over."""
        self._pace = Pace()
        self._verdict: str | None = None

    def take(self, record: Vitals, now: float) -> None:
        """Take a record of a rank. Records of older worlds are ignored."""
        if record.generation < self._generation:
            return
        if record.generation > self._generation:
            self._begin(record.generation)
        if record.size != self._size:
            self._rank_seconds += self._size * (now - self._sized)
            self._size, self._sized = record.size, now
        process = self._ranks.get(record.rank)
        if process is not None and process.last.process == record.process:
            process.take(record, now)
        else:
            self._ranks[record.rank] = self._arrived(record, now)
        if record.rank == 0:
            self._pace.take(record, now)

    def ended(self, rank: int) -> None:
        """Note that the program of a rank has ended, so it will send no more records."""
        if (process := self._ranks.get(rank)) is not None:
            process.ended = True

    def mark(self, verdict: str | None) -> None:
        """Set the reason why the run does not progress; None if it does again."""
        self._verdict = verdict

    def snapshot(self, now: float) -> RunSnapshot:
        """Return the state of the run now, as plain values."""
        slowest = slowest_of({rank: process.recent.done() for rank, process in self._judged(now)}, self._counted)
        shown = tuple(
            self._ranks[rank].row(rank, now, slowest) if rank in self._ranks else RankRow(rank)
            for rank in range(self._size)
        )
        if not any((row.communication or 0.0) >= SEEN for row in shown):
            shown = tuple(replace(row, communication=None) for row in shown)
        running = [row for row in shown if row.started and not row.ended] or shown
        speeds = [row.steps_per_second for row in shown if row.steps_per_second is not None]
        return RunSnapshot(
            title=self.title,
            seconds=now - self._started,
            size=self._size,
            generation=max(0, self._generation),
            restarts=self._restarts,
            changes=max(0, self._generation) - self._restarts,
            rows=shown,
            samples=sum(process.last.samples for process in self._all),
            steps_per_second=statistics.median(speeds) if speeds else None,
            samples_per_second=_sum(row.samples_per_second for row in running),
            data=_mean(row.data for row in shown),
            communication=_mean(row.communication for row in shown),
            compute=_mean(row.compute for row in shown),
            remaining=self._pace.remaining(now),
            slowest=slowest,
            verdict=self._verdict,
        )

    def summary(self, now: float) -> Summary:
        """Return the summary of the run, at its end or so far."""
        measured = [(process, whole) for process in self._all if (whole := process.whole) is not None]
        samples = sum(process.last.samples for process in self._all)
        seconds = now - self._started
        steps = self._steps_before + self._steps_of_last + self._steps()
        first = self._ranks.get(0)
        effective, lost = self._in_steps(now)
        parts = mean_shares([(one.last.rank, whole.seconds, shares(whole, one.end)) for one, whole in measured])
        return Summary(
            title=self.title,
            seconds=seconds,
            ranks=self._size,
            steps=steps,
            samples=samples,
            samples_per_second=samples / seconds if samples and seconds > 0 else None,
            steady_samples_per_second=steady_rate([whole for _, whole in measured], self._size),
            **parts,
            effective_training_time=effective,
            lost_training_time=lost,
            restarts=self._restarts,
            changes=max(0, self._generation) - self._restarts,
            metrics={} if first is None else first.metrics,
            slowest=slowest_of({rank: process.whole for rank, process in self._ranks.items()}, self._counted),
            cost=self._cost(now, steps, parts["communication"] is not None),
        )

    @property
    def _counted(self) -> bool:
        return any(process.last.total_steps for process in self._ranks.values())

    @property
    def _restarts(self) -> int:
        return self._survivors.count(0)

    def _begin(self, generation: int) -> None:
        if self._generation >= 0:
            self._survivors.append(0)
        self._steps_before += self._steps_of_last
        self._steps_of_last = self._steps()
        self._generation = generation
        self._before, self._ranks = {one.last.process: one for one in self._ranks.values()}, {}
        self._pace.forget()
        self._verdict = None

    def _arrived(self, record: Vitals, now: float) -> RankRecord:
        """Return the process of a first record in this world, which is known from the previous world or new."""
        if (process := self._before.pop(record.process, None)) is not None:
            if self._survivors:
                self._survivors[-1] += 1
            done = record.steps_before - process.last.steps_before
            self._steps_of_last = max(self._steps_of_last, done)
            process.enter(record, now)
            return process
        process = RankRecord(record, now)
        self._all.append(process)
        return process

    def _rank_seconds_by(self, now: float) -> float:
        return self._rank_seconds + self._size * (now - self._sized)

    def _in_steps(self, now: float) -> tuple[float, float] | tuple[None, None]:
        """Return the shares of all ranks' time in steps that count and in lost steps; None if unknown."""
        current = set(self._ranks.values())
        kept: dict[int, int] = {}  # steps of each world in its newest save, which rank 0 may have made for all
        for one in self._all:
            last = one.last
            if last.kept_steps is not None:
                done = last.kept_steps - last.steps_before
                kept[last.generation] = max(done, kept.get(last.generation, done))
        counted = lost = 0.0
        for one in self._all:
            done_by_then = kept.get(one.last.generation)
            after = None if one in current or done_by_then is None else one.last.steps_before + done_by_then
            useful, useless = one.worked(after)
            counted, lost = counted + useful, lost + useless
        total = self._rank_seconds_by(now)
        if not total or not counted + lost:
            return None, None
        most = max(total, counted + lost)  # the ranks' clocks and this one differ slightly
        return counted / most, lost / most

    def _cost(self, now: float, steps: int, communicates: bool) -> Cost:
        seconds = now - self._started
        rank_seconds = self._rank_seconds_by(now)
        gpus = self._gpus_per_rank
        if gpus is None:
            gpus = int(any(process.last.gpu_memory_bytes is not None for process in self._all))
        wholes = [(whole, one) for one in self._ranks.values() if (whole := one.whole) is not None and whole.steps]
        divided = communication = None
        if wholes and math.isclose(rank_seconds, seconds * self._size):
            whole, process = min(wholes, key=lambda each: each[0].communication)  # the others waited for this rank
            stepping = min(seconds, steps * whole.seconds / whole.steps)
            own = whole.compute + whole.data if process.end.stage else 1 - whole.communication
            divided, communication = own * stepping, whole.communication * stepping if communicates else None
        gpu_seconds = gpus * rank_seconds
        return Cost(seconds, self._size, rank_seconds, gpu_seconds, divided, communication, self._price_per_hour)

    def _steps(self) -> int:
        """Return the number of steps that the ranks have done in this world."""
        return max((process.steps for process in self._ranks.values()), default=0)

    def _judged(self, now: float) -> Iterable[tuple[int, RankRecord]]:
        """Return the ranks to compare; none while one is missing."""
        complete = len(self._ranks) == self._size and all(
            not process.ended and now - process.heard <= LONG for process in self._ranks.values()
        )
        return self._ranks.items() if complete else ()


def _sum(values: Iterable[float | None]) -> float | None:
    """Return the sum; None if a value is unknown, because a partial sum would mislead."""
    every = list(values)
    known = [value for value in every if value is not None]
    return sum(known) if known and len(known) == len(every) else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None
