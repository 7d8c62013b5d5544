"""Autotuning: the Bayesian search for the settings of highest throughput, fed with one score at a time."""

from __future__ import annotations

import csv
import math
import statistics
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from bayes_opt import BayesianOptimization

_CURIOSITY = 1.5
"""Standard deviations of doubt that count like as much of expected score. The library's 2.6 is for searches of 50 points
and more: with twenty it would still be exploring when the search ends."""


@dataclass(frozen=True)
class Knob:
    """One setting to tune.

    Attributes:
        name: Key of the setting.
        low: Smallest value to try.
        high: Largest value to try.
        log: Whether ratios matter and not differences, as with sizes.
        integer: Whether values are whole numbers.

    Raises:
        ValueError: The bounds make no such range.
    """

    name: str
    low: float
    high: float
    log: bool = False
    integer: bool = False

    def __post_init__(self) -> None:
        bounds = f"{self.name}: low={self.low}, high={self.high}"
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise ValueError(f"{bounds} are no range; pass two finite numbers, the smaller one first.")
        if self.log and self.low <= 0:
            raise ValueError(f"{bounds} cannot be tuned on a log scale; start above zero or pass log=False.")
        if self.integer and (self.low != int(self.low) or self.high != int(self.high)):
            raise ValueError(f"{bounds} are not whole numbers; pass whole ones or integer=False.")

    def value(self, position: float) -> float:
        """The setting at a position in [0, 1] of the range."""
        if self.log:
            value = self.low * (self.high / self.low) ** position
        else:
            value = self.low + (self.high - self.low) * position
        value = min(max(value, self.low), self.high)  # powers round
        return round(value) if self.integer else value

    def position(self, value: float) -> float:
        """Where a setting lies in the range: 0 to 1."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


Point = tuple[float, ...]
"""Values of the knobs that are tuned, in their order."""


@dataclass
class Autotuner:
    pass
