"""How long training stands still when one of two elastic ranks is lost: seconds to the first new step, and to the first
with the replacement.

`python -m benchmarks.elastic_recovery [--rounds 3] [--losses SIGKILL SIGSTOP executor fit large-fit]`

SIGKILL and SIGSTOP strike a rank of `run_elastic_local`, rank 0 and rank 1 in turn. For "executor" the executor's JVM
is killed on a standalone cluster of the tests', whose two workers and master run on this machine. Ranks make a commit
after each step of 10 ms; seconds count from the last commit of the rank that was lost.

For "fit" a rank of an elastic fit of TorchEstimator is killed (SIGKILL), rank 0 and rank 1 in turn: an MLP of 0.02 M
parameters with Adam, and one of 9.8 M for "large-fit"; commits come every 16 steps of 10 ms or more. Seconds count from
the last step of the rank that was lost, to the first new step, which is the first one after the last commit.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pyarrow as pa
import pyarrow.parquet as pq
import torch

import spark_hvd.torch as hvd
from spark_hvd.estimators import Callback, LocalBackend, Store, TorchEstimator, TrainState
from spark_hvd.runner import run_elastic, run_elastic_local
from spark_hvd.testing import FaultPlan
from tests.elastic_jobs import Job, note, read, train
from tests.spark.elastic_cluster import ElasticCluster, Progress, directed, elastic_cluster

cloudpickle.register_pickle_by_value(sys.modules[__name__])

MINUTES = 4
STEP = 0.01
BEFORE = 20
"""Steps before the loss."""
Seconds = tuple[float, float]
_FITS = {"fit": 128, "large-fit": 3100}
"""The widths of their MLPs."""


def measured(start: Callable[[Progress], Any], act: Callable[[], None] = lambda: None) -> Seconds:
    """Start ranks of which one is lost: seconds to the first new step, and to the first with a replacement."""
    with tempfile.TemporaryDirectory() as folder:
        progress = Progress(Path(folder))

        def script(progress: Progress) -> None:
            progress.wait(lambda line: line.step >= BEFORE)
            act()
            progress.wait(lambda line: line.generation > 0 and line.size == 2, 120)

        with directed(progress, script):
            start(progress)
        lines = read(progress.log)
    before = [line for line in lines if line.generation == 0]
    survivors = {line.process for line in lines if line.generation == 1}
    lost = max(line.time for line in before if line.process not in survivors)
    first = min(line.time for line in lines if line.generation > 0)
    replaced = min(line.time for line in lines if line.generation > 0 and line.size == 2)
    return first - lost, replaced - lost


def ranks(launch: Callable[..., list[Any]], faults: FaultPlan) -> Callable[[Progress], list[Any]]:
    """What starts a job that trains in a function of its own."""

    def start(progress: Progress) -> list[Any]:
        job = Job(faults, epochs=0, pause=STEP, log=str(progress.log), until=str(progress.until))
        return launch(train, [job], num_proc=2, min_num_proc=1, verbose=0)

    return start


def locally(kind: str, rounds: int) -> list[Seconds]:
    """Lose a rank of this machine, after one round that warms up."""
    seconds = []
    for number in range(rounds + 1):
        plan = getattr(FaultPlan(), {"SIGKILL": "kill", "SIGSTOP": "stop"}[kind])
        seconds.append(measured(ranks(run_elastic_local, plan(rank=number % 2, step=BEFORE))))
    return seconds[1:]


class Strikes(Callback):
    """Notes each step, and kills a rank of the first generation."""

    def __init__(self, log: Path, until: Path, rank: int) -> None:
        self.log, self.until, self.rank = log, until, rank  # no Progress, whose module imports pyspark in each rank

    def on_batch_end(self, state: TrainState) -> None:
        """See base class."""
        time.sleep(STEP)
        note(str(self.log), state.global_step)
        if (hvd.generation(), state.rank, state.global_step) == (0, self.rank, 2 * BEFORE):
            os.kill(os.getpid(), signal.SIGKILL)

    def on_epoch_end(self, state: TrainState) -> None:
        """See base class."""
        state.stop = self.until.exists()


def in_a_fit(width: int, rounds: int) -> list[Seconds]:
    """Lose a rank of an elastic fit, after one round that warms up."""
    net = torch.nn.Sequential(
        torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, width), torch.nn.Linear(width, 1)
    )
    numbers = torch.randn(8192, 64, generator=torch.Generator().manual_seed(0))

    def start(progress: Progress, rank: int) -> Any:
        folder = progress.log.parent
        rows = pa.table({"x": numbers.tolist(), "y": numbers.sum(1).tolist()})
        pq.write_table(rows, folder / "rows.parquet", row_group_size=1024)
        estimator = TorchEstimator(
            model=net,
            optimizer=lambda params: torch.optim.Adam(params, lr=1e-4),
            loss=torch.nn.MSELoss(),
            feature_cols=["x"],
            label_cols=["y"],
            epochs=1000,
            store=Store.create(folder),
            backend=LocalBackend(2, min_num_proc=1, max_num_proc=2, verbose=0),
            callbacks=[Strikes(progress.log, progress.until, rank)],
            verbose=0,
        )
        return estimator.fit_on_parquet(str(folder / "rows.parquet"))

    return [measured(partial(start, rank=number % 2)) for number in range(rounds + 1)][1:]


def on_a_cluster(rounds: int) -> list[Seconds]:
    """Lose an executor's JVM."""
    with tempfile.TemporaryDirectory() as folder, elastic_cluster(Path(folder)) as cluster:
        return [_executor(cluster, number) for number in range(rounds + 1)][1:]


def _executor(cluster: ElasticCluster, number: int) -> Seconds:
    cluster.provide(h2=1, h3=1)

    def launch(*args: Any, **options: Any) -> list[Any]:
        return run_elastic(*args, spark=cluster.session, **options)

    host = ("127.0.0.2", "127.0.0.3")[number % 2]
    return measured(ranks(launch, FaultPlan()), lambda: cluster.kill_executor(host))


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    kinds = ["SIGKILL", "SIGSTOP", "executor", *_FITS]
    parser.add_argument("--losses", nargs="+", choices=kinds, default=kinds)
    arguments = parser.parse_args()
    print("| lost | first new step, s | min-max | with the replacement, s | min-max |\n|---|---|---|---|---|")
    for kind in arguments.losses:
        if kind in _FITS:
            rounds = in_a_fit(_FITS[kind], arguments.rounds)
        else:
            rounds = on_a_cluster(arguments.rounds) if kind == "executor" else locally(kind, arguments.rounds)
        cells = [
            f"{statistics.median(each):.2f} | {min(each):.2f}-{max(each):.2f}" for each in zip(*rounds, strict=True)
        ]
        print(f"| {kind} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
