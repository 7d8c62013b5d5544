"""The tuner, with made-up throughputs."""

from __future__ import annotations

import csv
import math
import random
from pathlib import Path
from typing import Any

import pytest

from spark_hvd.torch.optimizer.tuner import Autotuner

CANDIDATES = {"bytes": [1 << power for power in range(20, 29)], "milliseconds": [10.0 * k for k in range(1, 11)]}
START: dict[str, float] = {"bytes": 1 << 27, "milliseconds": 90.0}
PEAK = 3e9


def throughput(values: dict[str, float]) -> float:
    """Return bytes per second with a peak inside the range, at 16 MiB and 30 ms."""
    off = math.log2(values["bytes"] / (1 << 24)) / 3
    late = (values["milliseconds"] - 30) / 40
    return PEAK * math.exp(-(off**2)) * (0.3 + 0.7 * math.exp(-(late**2)))


def tuner(**options: Any) -> Autotuner:
    return Autotuner(options.pop("candidates", CANDIDATES), START, **options)


def tuned(tuner: Autotuner, seed: int = 0, noise: float = 0.0, unit: float = 1.0) -> list[dict[str, float]]:
    """Return the values of every sample, until the tuner is done."""
    generator, tried = random.Random(seed), []
    while not tuner.done:
        tried.append(tuner.current)
        changed = tuner.record(unit * throughput(tuner.current) * math.exp(generator.gauss(0.0, noise)))
        assert changed == (None if tuner.current == tried[-1] else tuner.current)
    return tried


@pytest.mark.parametrize("seed", range(3))
def test_comes_near_the_peak_in_spite_of_noise(seed: int) -> None:
    search = tuner()
    assert throughput(search.current) < 0.4 * PEAK
    tried = tuned(search, seed, noise=0.03)
    assert len(tried) == 3 + 20 + 2
    assert throughput(search.current) > 0.9 * PEAK
    assert search.record(1.0) is None


def test_the_same_scores_lead_to_the_same_search_in_any_unit() -> None:
    first, second = tuner(samples=5), tuner(samples=5)
    assert tuned(second, unit=2.0**-30) == tuned(first)
    assert first.current == second.current


def test_all_that_is_tried_is_a_candidate() -> None:
    for values in tuned(tuner(samples=8)):
        assert list(values) == list(CANDIDATES)
        assert all(value in CANDIDATES[name] for name, value in values.items())


def test_a_start_that_is_no_candidate_becomes_one() -> None:
    search = Autotuner({"on": (1, 2, 4)}, {"on": 3}, warmup_samples=0)
    assert search.current == {"on": 3}
    assert search.record(1.0) == {"on": 4}
    assert search.record(0.5) == {"on": 2}


def test_warm_up_is_thrown_away() -> None:
    search = tuner(warmup_samples=2, samples=6)
    for _ in range(2):
        assert search.record(1e30) is None  # if this were kept, the start would win
        assert search.current == START
    tuned(search)
    assert search.current != START


def test_the_two_best_are_checked() -> None:
    search = tuner(warmup_samples=0, samples=4)
    points = []
    for score in (10.0, 40.0, 5.0, 30.0):
        points.append(search.current)
        search.record(score)
    assert search.current == points[1]
    search.record(8.0)  # a lucky sample: now 24 in the median
    assert search.current == points[3]
    assert not search.done
    assert search.record(26.0) is None  # 28
    assert search.done
    assert search.current == points[3]


def test_repeats_count_by_their_median() -> None:
    search = Autotuner({"on": (0, 1)}, {"on": 0}, warmup_samples=0, samples=9)
    zeros, ones = iter([100.0, *[1.0] * 11]), iter([2.0] * 12)
    while not search.done:
        search.record(next(ones) if search.current["on"] else next(zeros))
    assert search.current == {"on": 1}


def test_a_setting_with_one_candidate_keeps_it() -> None:
    search = tuner(candidates={**CANDIDATES, "bytes": [7]}, samples=4)
    tried = tuned(search)
    assert {values["bytes"] for values in [*tried, search.current]} == {7}
    assert len({values["milliseconds"] for values in tried}) > 1


def test_nothing_to_tune() -> None:
    search = tuner(candidates={name: [value] for name, value in START.items()})
    assert search.done
    assert search.current == START
    assert search.record(1.0) is None


def test_one_trial_keeps_the_start() -> None:
    search = tuner(warmup_samples=0, samples=1)
    assert search.record(5.0) is None
    assert search.record(6.0) is None
    assert search.done
    assert search.current == START


def test_log(tmp_path: Path) -> None:
    log = tmp_path / "tune.csv"
    log.write_text("of an earlier run\n" * 9)
    search = tuner(warmup_samples=1, samples=3, log_path=log)
    expected = []
    for number, phase in enumerate(["warmup", "trial", "trial", "trial", "final", "final"], 1):
        score = throughput(search.current)
        expected.append([str(number), *map(str, search.current.values()), str(score), phase])
        search.record(score)
        assert len(log.read_text().splitlines()) == number + 1  # at once
    assert search.done
    with log.open(newline="") as file:
        rows = list(csv.reader(file))
    assert rows == [["sample", "bytes", "milliseconds", "score", "phase"], *expected]


def test_log_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"cannot write the autotune log .*missing.*No such file.*folder"):
        tuner(log_path=tmp_path / "missing" / "tune.csv")
    folder = tmp_path / "gone"
    folder.mkdir()
    search = tuner(log_path=folder / "tune.csv")
    (folder / "tune.csv").unlink()
    folder.rmdir()
    with pytest.warns(UserWarning, match="ends here"):
        search.record(1.0)
    search.record(1.0)


@pytest.mark.parametrize("score", [math.nan, math.inf, -1.0, 0.0])
def test_bad_scores(score: float) -> None:
    search = tuner()
    with pytest.raises(ValueError, match=f"score={score}"):
        search.record(score)
