"""Autotuning of training steps: rank 0 tries values during the first steps, and all ranks switch at the same step.

It tries the size of the buckets, the way in which ranks on one host reduce them (Gloo or shared memory), the number of
Gloo's threads, and the fusion threshold of named collectives. The score is bytes of gradients per second over whole
steps, so it includes the effect of overlap with computation.
"""

from __future__ import annotations

import csv
import logging
import math
import statistics
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from spark_hvd.torch.optimizer.buckets import MEGABYTE
from spark_hvd.transport.exchange import exchange
from spark_hvd.world.config import Config

if TYPE_CHECKING:
    from spark_hvd.engine.engine import Engine
    from spark_hvd.torch.optimizer.reducer import GradientReducer

_log = logging.getLogger("spark_hvd")

GLOO_THREADS = (1, 2, 3, 4)
"""Values to try."""
_BUCKET_CAPS_MB = tuple(2.0**power for power in range(-1, 8))
_FUSION_THRESHOLDS_MB = tuple(2.0**power for power in range(9))

Point = tuple[float, ...]
"""A value for every setting, in their order."""


class Autotuner:
    """Tries settings, one sample of training each, and keeps the fastest. One rank has it and tells the others.

    The first samples are discarded, because start-up is not typical of training. Each further sample is a trial. The
    search moves one setting at a time, up and then down its candidates, and stays where the score is higher. When no
    move helps, it halves the distance. At the end the two best points run once more, since the best of many noisy
    scores may be luck; the better one stays.

    Args:
        candidates: Values to try for each setting, ascending. A setting with one candidate keeps it; if no setting has
            more, `done` is true at once.
        start: Initial values of all settings; a value that is not a candidate becomes one.
        warmup_samples: Samples to discard.
        samples: Trials, before the two best are checked.
        log_path: A CSV file with one line per sample: its number, the value of every setting, the score, and "warmup",
            "trial" or "final" for the check of the two best. An existing file is overwritten.

    Raises:
        OSError: `log_path` cannot be written.
    """

    def __init__(
        self,
        candidates: Mapping[str, Sequence[float]],
        start: Mapping[str, float],
        *,
        warmup_samples: int = 3,
        samples: int = 20,
        log_path: str | PathLike[str] | None = None,
    ) -> None:
        self._candidates = {
            name: sorted({*values, start[name]}) if len(values) > 1 else list(values)
            for name, values in candidates.items()
        }
        self._point: Point = tuple(
            start[name] if len(values) > 1 else values[0] for name, values in self._candidates.items()
        )
        self._warmup, self._trials = warmup_samples, samples
        self._scores: dict[Point, list[float]] = {}
        self._proposals = self._search()
        self._finalists: list[Point] = []
        self._unchecked: list[Point] = []
        self._recorded = 0
        self.done = all(len(values) == 1 for values in self._candidates.values())
        self._log = None if log_path is None else Path(log_path)
        if self._log is not None:
            _create(self._log, ["sample", *self._candidates, "score", "phase"])

    @property
    def current(self) -> dict[str, float]:
        """The present values of all settings, in their order."""
        return dict(zip(self._candidates, self._point, strict=True))

    def record(self, score: float) -> dict[str, float] | None:
        """Record the score of the present values, and choose the next ones. Ignored once `done` is true.

        ``score`` is a rate, such as bytes per second: only ratios count.

        Returns:
            The values of all settings if they change now, else None.

        Raises:
            ValueError: `score` is not a finite number above zero.
        """
        if not 0 < score < math.inf:
            raise ValueError(f"score={score}: expected bytes per second, a finite number above zero.")
        if self.done:
            return None
        before = self._point
        self._recorded += 1
        trial = self._recorded - self._warmup
        if trial <= 0:
            self._write(score, "warmup")
            return None
        self._write(score, "trial" if trial <= self._trials else "final")
        self._scores.setdefault(self._point, []).append(score)
        if trial < self._trials:
            self._point = next(self._proposals)
        else:
            self._settle()
        return self.current if self._point != before else None

    def _settle(self) -> None:
        if not self._finalists:
            self._finalists = sorted(self._scores, key=self._score, reverse=True)[:2]
            self._unchecked = self._finalists.copy()
        if self._unchecked:
            self._point = self._unchecked.pop(0)
        else:
            self._point = max(self._finalists, key=self._score)
            self.done = True

    def _score(self, point: Point) -> float:
        return statistics.median(self._scores[point])

    def _search(self) -> Iterator[Point]:
        """Yield what to try next, without end; a point's score is known before the next one is requested."""
        distance = max(map(len, self._candidates.values())) // 4 or 1
        while distance:
            began = best = self._best()
            for place, values in enumerate(self._candidates.values()):
                for step in (distance, -distance):
                    index = min(max(values.index(best[place]) + step, 0), len(values) - 1)
                    point = (*best[:place], values[index], *best[place + 1 :])
                    if point in self._scores:
                        continue
                    yield point
                    if self._score(point) > self._score(best):
                        best = point
                        break
            if best == began:
                distance //= 2
        while True:  # a score may have been luck
            yield self._best()

    def _best(self) -> Point:
        return max(self._scores, key=self._score)

    def _write(self, score: float, phase: str) -> None:
        if self._log is None:
            return
        try:
            _append(self._log, [self._recorded, *self._point, score, phase])
        except OSError as error:
            warnings.warn(f"the autotune log {self._log} ends here: {error}", stacklevel=3)
            self._log = None  # training continues


@dataclass(frozen=True, slots=True)
class TunedGroups:
    """The process groups that a tuned reducer can use.

    Attributes:
        own: The reducer's original group.
        by_threads: One group for each of GLOO_THREADS; empty if Gloo is not used.
    """

    own: dist.ProcessGroup
    by_threads: Sequence[dist.ProcessGroup]


class StepTuner:
    """Tunes one optimizer's reducer. Every rank has one; rank 0's decides.

    ``bucket_cap_mb`` is the initial value, and whether the user has set it, in which case it stays.
    """

    def __init__(
        self,
        reducer: GradientReducer,
        groups: TunedGroups,
        device: torch.device,
        engine: Engine,
        config: Config,
        bucket_cap_mb: tuple[float, bool],
        in_memory: bool,
    ) -> None:
        self._reducer = reducer
        self._groups = groups
        self._device = device
        self._engine = engine
        self._steps_per_sample = config.autotune_steps_per_sample
        self._steps = 0
        self._began = 0.0
        cap, cap_is_fixed = bucket_cap_mb
        start = {
            "bucket_cap_mb": cap,
            "fusion_threshold_mb": config.fusion_threshold / MEGABYTE,
            "shared_memory": int(in_memory),
            "gloo_threads": 2,  # torch's own choice
        }
        candidates: dict[str, Sequence[float]] = {
            "bucket_cap_mb": [cap] if cap_is_fixed else _BUCKET_CAPS_MB,
            "fusion_threshold_mb": _FUSION_THRESHOLDS_MB,
            "shared_memory": (0, 1) if in_memory else [0],
            "gloo_threads": GLOO_THREADS if groups.by_threads else [2],
        }
        self._tuner: Autotuner | None = None
        if dist.get_rank(groups.own) == 0:
            self._tuner = Autotuner(
                candidates,
                start,
                warmup_samples=config.autotune_warmup_samples,
                samples=config.autotune_max_samples,
                log_path=config.autotune_log,
            )

    def pause(self) -> None:
        """Restart the sample: a rank has joined, so the duration of a step says little, and not all ranks make it."""
        self._steps = 0

    def stepped(self) -> None:
        """Record the end of a step; after a fixed number of steps, rank 0 tells all ranks what to use next."""
        if self._steps == 0:
            self._began = time.perf_counter()
        self._steps += 1
        if self._steps <= self._steps_per_sample:
            return
        seconds = time.perf_counter() - self._began
        self._steps = 0
        values, done = None, False
        if self._tuner is not None:
            values = self._tuner.record(self._reducer.nbytes * self._steps_per_sample / seconds)
            done = self._tuner.done
        # Here, and only here, all ranks are known to be between the same two steps.
        values, done = exchange([values, done], self._groups.own, self._device)[0]
        if values is not None:
            self._use(values)
        if done:
            self._reducer.tuner = None
            if self._tuner is not None:
                chosen = ", ".join(f"{name}={value:g}" for name, value in self._tuner.current.items())
                _log.info("autotuning has ended: %s", chosen)

    def _use(self, values: dict[str, float]) -> None:
        in_memory = bool(values["shared_memory"])
        group = self._groups.own
        if self._groups.by_threads and not in_memory:
            group = self._groups.by_threads[GLOO_THREADS.index(int(values["gloo_threads"]))]
        cap = int(values["bucket_cap_mb"] * MEGABYTE)
        self._reducer.replan(cap, group, in_memory=in_memory)
        if dist.get_rank() == 0:
            threshold = int(values["fusion_threshold_mb"] * MEGABYTE)
            self._engine.tune(replace(self._engine.config, fusion_threshold=threshold))


def _create(log: Path, header: Sequence[str]) -> None:
    try:
        _append(log, header, mode="w")
    except OSError as error:
        raise OSError(
            f"cannot write the autotune log {log}: {error.strerror}. Choose a file in a folder that you can write to."
        ) from error


def _append(log: Path, row: Sequence[object], mode: str = "a") -> None:
    # Opened for every line: so nothing is lost if training is killed, and there is no file to close.
    with log.open(mode, newline="") as file:
        csv.writer(file, lineterminator="\n").writerow(row)
