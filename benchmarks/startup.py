"""Start-up of two ranks that only return their rank: ``spark_hvd.run``, also over MPI, beside TorchDistributor.

    python -m benchmarks.startup --runs 5

Warm: in turn on one local[2] session, two runs of one, then two of the other. The second of the two is the usual case,
a run after a run; the first comes after a job of another kind, for which Spark has new Python workers to start.
First: a new session each time, in turn.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
os.environ["PYSPARK_PYTHON"] = sys.executable


def ours(spark: Any, **options: Any) -> None:
    import spark_hvd

    def fn() -> int:
        import spark_hvd.torch as hvd

        return hvd.rank()

    assert spark_hvd.run(fn, num_proc=2, spark=spark, **options) == [0, 1]


def over_mpi(spark: Any) -> None:
    ours(spark, backend="mpi")


def torch_distributor(spark: Any) -> None:
    from pyspark.ml.torch.distributor import TorchDistributor

    def fn() -> int:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        rank = dist.get_rank()
        dist.destroy_process_group()
        return rank

    with contextlib.redirect_stdout(io.StringIO()):
        assert TorchDistributor(num_processes=2, local_mode=False, use_gpu=False).run(fn) == 0


PEERS: dict[str, Callable[[Any], None]] = {
    "spark_hvd.run": ours,
    'spark_hvd.run, backend="mpi"': over_mpi,
    "TorchDistributor": torch_distributor,
}


def session() -> Any:
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[2]").appName("startup")
    for key, value in {
        "spark.ui.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.log.level": "ERROR",
        "spark.ui.showConsoleProgress": "false",
    }.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    spark.range(2, numPartitions=2).mapInArrow(lambda batches: batches, "id long").collect()  # workers are up
    return spark


def timed(peer: str, spark: Any) -> float:
    started = time.perf_counter()
    PEERS[peer](spark)
    return time.perf_counter() - started


def warm(runs: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds of runs after a run of the same launcher, and of runs after one of the other."""
    spark = session()
    for peer in PEERS:
        timed(peer, spark)
    after_own: dict[str, list[float]] = {peer: [] for peer in PEERS}
    after_other: dict[str, list[float]] = {peer: [] for peer in PEERS}
    for _ in range(runs):
        for peer in PEERS:
            after_other[peer].append(timed(peer, spark))
            after_own[peer].append(timed(peer, spark))
    spark.stop()
    return after_own, after_other


def first(runs: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {peer: [] for peer in PEERS}
    for _ in range(runs):
        for peer in PEERS:
            command = [sys.executable, "-m", "benchmarks.startup", "--one-first-run", peer]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            seconds[peer].append(float(done.stdout.split()[-1]))
    return seconds


def table(title: str, seconds: dict[str, list[float]]) -> None:
    base = statistics.median(seconds["spark_hvd.run"])
    for peer, values in seconds.items():
        middle = statistics.median(values)
        print(f"| {title} | {peer} | {middle:.2f} | {min(values):.2f}-{max(values):.2f} | {middle / base:.1f} x |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--one-first-run", choices=list(PEERS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one_first_run:
        spark = session()
        print(timed(args.one_first_run, spark))
        return
    print("| run | launcher | median s | min-max s | against spark_hvd |\n|---|---|---|---|---|")
    after_own, after_other = warm(args.runs)
    table("warm session, a run after a run", after_own)
    table("warm session, a run after another kind of job", after_other)
    table("first run of a session", first(args.runs))


if __name__ == "__main__":
    main()
