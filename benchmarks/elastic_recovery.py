"""How long training stands still when one of two elastic ranks is lost: seconds to the first new step, and to the first
with the replacement.

`python -m benchmarks.elastic_recovery [--rounds 5] [--losses SIGKILL SIGSTOP executor]`

SIGKILL and SIGSTOP strike a rank of `run_elastic_local`, rank 0 and rank 1 in turn. For "executor" the executor's JVM
is killed on a standalone cluster of the tests', whose two workers and master run on this machine. Ranks make a commit
after each step of 10 ms; seconds count from the last commit of the rank that was lost.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle

from spark_hvd.runner import run_elastic, run_elastic_local
from spark_hvd.testing import FaultPlan
from tests.elastic_jobs import Job, read, train
from tests.spark.elastic_cluster import ElasticCluster, Progress, directed, elastic_cluster

cloudpickle.register_pickle_by_value(sys.modules[__name__])

STEP = 0.01
BEFORE = 20
"""Steps before the loss."""
Seconds = tuple[float, float]


def measured(launch: Callable[..., list[Any]], faults: FaultPlan, act: Callable[[], None] = lambda: None) -> Seconds:
    """Run a job that loses a rank: seconds to the first new step, and to the first with a replacement."""
    with tempfile.TemporaryDirectory() as folder:
        progress = Progress(Path(folder))

        def script(progress: Progress) -> None:
            progress.wait(lambda line: line.step >= BEFORE)
            act()
            progress.wait(lambda line: line.generation > 0 and line.size == 2, 120)

        job = Job(faults, epochs=0, pause=STEP, log=str(progress.log), until=str(progress.until))
        with directed(progress, script):
            launch(train, [job], num_proc=2, min_num_proc=1, verbose=0)
        lines = read(progress.log)
    before = [line for line in lines if line.generation == 0]
    survivors = {line.process for line in lines if line.generation == 1}
    lost = max(line.time for line in before if line.process not in survivors)
    first = min(line.time for line in lines if line.generation > 0)
    replaced = min(line.time for line in lines if line.generation > 0 and line.size == 2)
    return first - lost, replaced - lost


def locally(kind: str, rounds: int) -> list[Seconds]:
    """Lose a rank of this machine, after one round that warms up."""
    seconds = []
    for number in range(rounds + 1):
        plan = getattr(FaultPlan(), {"SIGKILL": "kill", "SIGSTOP": "stop"}[kind])
        seconds.append(measured(run_elastic_local, plan(rank=number % 2, step=BEFORE)))
    return seconds[1:]


def on_a_cluster(rounds: int) -> list[Seconds]:
    """Lose an executor's JVM."""
    with tempfile.TemporaryDirectory() as folder, elastic_cluster(Path(folder)) as cluster:
        return [_executor(cluster, number) for number in range(rounds + 1)][1:]


def _executor(cluster: ElasticCluster, number: int) -> Seconds:
    cluster.provide(h2=1, h3=1)

    def launch(*args: Any, **options: Any) -> list[Any]:
        return run_elastic(*args, spark=cluster.session, **options)

    host = ("127.0.0.2", "127.0.0.3")[number % 2]
    return measured(launch, FaultPlan(), lambda: cluster.kill_executor(host))


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--losses", nargs="+", choices=["SIGKILL", "SIGSTOP", "executor"], default=None)
    arguments = parser.parse_args()
    print("| lost | first new step, s | min-max | with the replacement, s | min-max |\n|---|---|---|---|---|")
    for kind in arguments.losses or ["SIGKILL", "SIGSTOP", "executor"]:
        rounds = on_a_cluster(arguments.rounds) if kind == "executor" else locally(kind, arguments.rounds)
        cells = [
            f"{statistics.median(each):.2f} | {min(each):.2f}-{max(each):.2f}" for each in zip(*rounds, strict=True)
        ]
        print(f"| {kind} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
