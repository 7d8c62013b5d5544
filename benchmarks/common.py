"""What several benchmarks need: a quiet local Spark, turns that kinds take, and the times of calls and steps."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

T = TypeVar("T")


def session(slots: int = 2, settings: Mapping[str, str] | None = None) -> SparkSession:
    """Start a local Spark that listens on the loopback interface only."""
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    os.environ["PYSPARK_PYTHON"] = sys.executable
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(f"local[{slots}]").appName("benchmark")
    for key, value in {
        "spark.ui.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.log.level": "ERROR",
        "spark.ui.showConsoleProgress": "false",
        **(settings or {}),
    }.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def in_turns(kinds: Sequence[str], rounds: int, measure: Callable[[str], T], warm_up: int = 0) -> dict[str, list[T]]:
    """Measure each kind once a round, in reverse order in every other round; rounds that warm up are left out.

    Returns:
        What was measured of each kind, by round.
    """
    found: dict[str, list[T]] = {kind: [] for kind in kinds}
    for number in range(-warm_up, rounds):
        for kind in kinds if number % 2 == 0 else kinds[::-1]:
            measured = measure(kind)
            if number >= 0:
                found[kind].append(measured)
    return found


def seconds_a_call(call: Callable[[], object], calls: int, barrier: Callable[[], object]) -> tuple[float, float]:
    """Mean seconds of the clock and of processor time, after a barrier."""
    barrier()
    start, busy = time.perf_counter(), time.process_time()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls, (time.process_time() - busy) / calls


def milliseconds_of(step: Callable[[], object], steps: int) -> list[float]:
    """Milliseconds of each step."""
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - start))
    return times
