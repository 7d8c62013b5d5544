"""Autotuning: the Bayesian search for the settings of highest throughput, fed with one score at a time."""

from __future__ import annotations

import csv
import math
import statistics
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from bayes_opt import BayesianOptimization


@dataclass(frozen=True)
class Knob:
    """One setting to tune.

    Attributes:
        name: Key of the setting.
        low: Smallest value to try.
        high: Largest value to try.
        log: Whether ratios matter and not differences, as with sizes.
        integer: Whether values are whole numbers.
    """

    name: str
    low: float
    high: float
    log: bool = False
    integer: bool = False

    def value(self, position: float) -> float:
        """The setting at a position in [0, 1] of the range."""
        width = self.high - self.low
        value: float = self.low * (self.high / self.low) ** position if self.log else self.low + width * position
        value = min(max(value, self.low), self.high)  # a power is rounded
        return round(value) if self.integer else value

    def within(self, value: float) -> float:
        """The value itself, or a ValueError if it is none of this knob's."""
        if not self.low <= value <= self.high or (self.integer and value != int(value)):
            kind = "a whole number" if self.integer else "a number"
            raise ValueError(f"{self.name}={value}: expected {kind} from {self.low} to {self.high}.")
        return value

    def position(self, value: float) -> float:
        """Where a setting lies in the range: 0 to 1."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


Point = tuple[float, ...]
"""Values of the knobs that are tuned, in their order."""


class Autotuner:
    """Tries settings, one sample of training each, and keeps the fastest. One rank has it and tells the others.

    The first samples are thrown away: start-up is not what training is like. Each further one is a trial, of `start`
    and then of what a Gaussian process over the scores so far makes most promising (upper confidence bound). At last
    the two best run once more, as the best of many noisy scores is a lucky one, and the better of them stays.

    Args:
        knobs: What is tuned.
        start: The values to begin with, of every knob that is not fixed.
        warmup_samples: Samples to throw away.
        samples: Trials, before the two best are checked.
        noise: Variance of the noise in a score, where the variance of all scores is one; added to the diagonal of the
            process's covariance.
        seed: The same seed and scores give the same settings.
        log_path: A CSV file with a line a sample: its number, the value of every knob, the score, and "warmup", "trial"
            or "final" for the check of the two best. An existing file is overwritten.
        fixed: Knobs that keep this value, in their range or not. If none is left to tune, `done` is true at once.

    Raises:
        ImportError: bayesian-optimization is not installed.
        ValueError: A value to start with is none of its knob's.
        OSError: `log_path` cannot be written.
    """

    def __init__(
        self,
        knobs: Sequence[Knob],
        start: Mapping[str, float],
        *,
        warmup_samples: int = 3,
        samples: int = 20,
        noise: float = 0.8,
        seed: int = 0,
        log_path: str | PathLike[str] | None = None,
        fixed: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        self._knobs = tuple(knobs)
        self._fixed = dict(fixed)
        self._free = [knob for knob in knobs if knob.name not in fixed]
        if self._free:
            _library()  # a missing package is an error now, not after the warm-up
        self._warmup, self._trials, self._noise, self._seed = warmup_samples, samples, noise, seed
        self._point: Point = tuple(knob.within(start[knob.name]) for knob in self._free)
        self._scores: dict[Point, list[float]] = {}
        self._finalists: list[Point] = []
        self._unchecked: list[Point] = []
        self._recorded = 0
        self._done = not self._free
        self._log = None if log_path is None else Path(log_path)
        if self._log is not None:
            _create(self._log, ["sample", *(knob.name for knob in knobs), "score", "phase"])

    @property
    def current(self) -> dict[str, float]:
        """The values in force, of all knobs in their order."""
        values = self._fixed | dict(zip((knob.name for knob in self._free), self._point, strict=True))
        return {knob.name: values[knob.name] for knob in self._knobs}

    @property
    def done(self) -> bool:
        """Whether the values in force are final."""
        return self._done

    def record(self, score: float) -> dict[str, float] | None:
        """Take in what the values in force have achieved, and choose the next ones. Ignored once `done` is true.

        Choosing takes some tenths of a second.

        Args:
            score: Bytes per second, or any other rate: only ratios count.

        Returns:
            The values of all knobs if they change now, else None.

        Raises:
            ValueError: `score` is not a finite number above zero.
        """
        if not 0 < score < math.inf:
            raise ValueError(f"score={score}: expected bytes per second, a finite number above zero.")
        if self._done:
            return None
        before = self.current
        self._recorded += 1
        trial = self._recorded - self._warmup
        if trial <= 0:
            self._write(score, "warmup")
            return None
        self._write(score, "trial" if trial <= self._trials else "final")
        self._scores.setdefault(self._point, []).append(score)
        if trial < self._trials:
            self._point = self._suggestion()
        else:
            self._settle()
        return self.current if self.current != before else None

    def _settle(self) -> None:
        if not self._finalists:
            self._finalists = sorted(self._scores, key=self._score, reverse=True)[:2]
            self._unchecked = self._finalists.copy()
        if self._unchecked:
            self._point = self._unchecked.pop(0)
        else:
            self._point = max(self._finalists, key=self._score)
            self._done = True

    def _score(self, point: Point) -> float:
        return statistics.median(self._scores[point])

    def _suggestion(self) -> Point:
        # A new optimizer each time: every score changes the mean and the variance by which all are normalized, and
        # points tried repeatedly become one point of less noise (the library would print a line about each).
        space, seed = {knob.name: (0.0, 1.0) for knob in self._free}, self._seed + self._recorded
        optimizer = _library()(None, space, random_state=seed, verbose=0, allow_duplicate_points=True)
        optimizer.set_gp_params(alpha=np.array([self._noise / len(scores) for scores in self._scores.values()]))
        scores = [self._score(point) for point in self._scores]
        mean, deviation = statistics.fmean(scores), statistics.pstdev(scores) or 1.0
        for point, score in zip(self._scores, scores, strict=True):
            # What was in force, which rounding to whole numbers may have moved from what was suggested.
            positions = {knob.name: knob.position(value) for knob, value in zip(self._free, point, strict=True)}
            optimizer.register(positions, (score - mean) / deviation)
        suggested = optimizer.suggest()
        return tuple(knob.value(float(suggested[knob.name])) for knob in self._free)

    def _write(self, score: float, phase: str) -> None:
        if self._log is None:
            return
        try:
            _append(self._log, [self._recorded, *self.current.values(), score, phase])
        except OSError as error:
            warnings.warn(f"the autotune log {self._log} ends here: {error}", stacklevel=3)
            self._log = None  # training goes on


def _library() -> type[BayesianOptimization]:
    try:
        from bayes_opt import BayesianOptimization
    except ImportError as error:
        raise ImportError(
            "autotuning needs the package bayesian-optimization; pip install 'spark_hvd[autotune]', or switch it off."
        ) from error
    return BayesianOptimization


def _create(log: Path, header: Sequence[str]) -> None:
    try:
        _append(log, header, mode="w")
    except OSError as error:
        raise OSError(
            f"cannot write the autotune log {log}: {error.strerror}. Name a file in a folder that you may write to."
        ) from error


def _append(log: Path, row: Sequence[object], mode: str = "a") -> None:
    # Opened for every line: nothing is lost if training is killed, and there is no file to close.
    with log.open(mode, newline="") as file:
        csv.writer(file, lineterminator="\n").writerow(row)
