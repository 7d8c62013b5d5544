"""What it costs to check pickles: hvd.broadcast_object with the digest and without, by turns, on loopback.

python -m benchmarks.objects --np 2 --megabytes 0.001 1 10
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import time
from types import SimpleNamespace
from unittest import mock

import spark_hvd

MINUTES = 0.5


def measure(kind: str, megabytes: float, rounds: int) -> tuple[float, float]:
    """Median milliseconds of a call without and with the digest."""
    import numpy as np

    import spark_hvd.torch as hvd
    from spark_hvd.collectives import objects

    unchecked = SimpleNamespace(sha256=lambda data: SimpleNamespace(hexdigest=lambda: ""))
    size = int(megabytes * 1e6)
    array, strings = np.random.default_rng(0).random(size // 8), [f"{number:0100}" for number in range(size // 100)]
    value = {"array": array} if kind == "array" else strings
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(2 * rounds + 4):
        checked = bool(turn % 2)
        with mock.patch.object(objects, "hashlib", hashlib if checked else unchecked):
            hvd.barrier()
            start = time.perf_counter()
            hvd.broadcast_object(value, root_rank=0)
            hvd.barrier()
        if turn >= 4:
            seconds[checked].append(time.perf_counter() - start)
    return statistics.median(seconds[False]) * 1e3, statistics.median(seconds[True]) * 1e3


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--np", type=int, default=2, help="ranks")
    parser.add_argument("--megabytes", type=float, nargs="+", default=[0.001, 1.0, 10.0])
    parser.add_argument("--rounds", type=int, default=60)
    given = parser.parse_args()
    print("| object | megabytes | without, ms | with, ms | ratio |\n|---|---|---|---|---|")
    for kind in ("array", "strings"):
        for megabytes in given.megabytes:
            without, checked = spark_hvd.run_local(measure, args=(kind, megabytes, given.rounds), num_proc=given.np)[0]
            print(f"| {kind} | {megabytes:g} | {without:.3f} | {checked:.3f} | {checked / without:.3f} |", flush=True)


if __name__ == "__main__":
    main()
