"""Start-up of two ranks: first runs and fits of fresh sessions by their parts; ``run`` beside TorchDistributor.

    python -m benchmarks.startup --runs 5

First: each in a process and a session of its own, in turn. A bare barrier job, whose tasks do nothing, is what Spark
takes for itself. Ranks make one step of Adam, so that the imports of torch's optimizers count; the fit is of 20,000
rows in Parquet. What a program does before it calls, its own imports and the start of the session with the JVM, is a
column of its own; so is ``warm_up``, where it goes before.

Warm: in turn on one local[2] session, two runs of one launcher, then two of the next. The second of the two is the
usual case, a run after a run; the first comes after a job of another kind, for which Spark has new Python workers to
start.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.common import session

MINUTES = 5
ROWS = 20_000
PARTS = ("before the run", "to the stage", "to its tasks", "to the ranks", "to fn", "fn", "return")


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


# -- first runs


def bare(spark: Any, _: str) -> dict[str, float]:
    """When the tasks of a barrier job that do nothing have begun and ended."""

    def task(batches: Iterator[Any]) -> Iterator[Any]:
        import time

        import pyarrow

        begun = time.time()
        for _ in batches:
            pass
        yield pyarrow.RecordBatch.from_pydict({"begun": [begun], "ended": [time.time()]})

    frame = spark.range(0, 2, 1, 2).mapInArrow(task, "begun double, ended double", barrier=True)
    table = frame.toArrow() if hasattr(frame, "toArrow") else frame.toPandas()
    return {"there": max(table["begun"].to_pylist()), "ended": max(table["ended"].to_pylist())}


def run(spark: Any, _: str) -> dict[str, float]:
    """When ranks were forked and fn began and ended on the last of them."""
    import spark_hvd

    def fn() -> dict[str, float]:
        import time

        begun = time.time()
        import psutil
        import torch

        import spark_hvd.torch as hvd

        net = torch.nn.Linear(20, 1)
        optimizer = hvd.DistributedOptimizer(torch.optim.Adam(net.parameters()), net.named_parameters())
        net(torch.ones(4, 20)).sum().backward()
        optimizer.step()
        return {"forked": psutil.Process().create_time(), "begun": begun, "ended": time.time()}

    ranks = spark_hvd.run(fn, num_proc=2, spark=spark, verbose=0)
    return {name: max(rank[name] for rank in ranks) for name in ranks[0]}


def fit(spark: Any, data: str) -> dict[str, float]:
    """When the fit came to its run, and what is known of that."""
    import psutil
    import torch

    from spark_hvd.estimators import Callback, SparkBackend, TorchEstimator

    class Times(Callback):
        def on_train_begin(self, state: Any) -> None:
            self.begun = time.time()

        def on_train_end(self, state: Any) -> None:
            if state.rank == 0:
                times = {"forked": psutil.Process().create_time(), "begun": self.begun, "ended": time.time()}
                with open(f"{data}.times", "w") as file:
                    json.dump(times, file)

    net = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    estimator = TorchEstimator(
        model=net, optimizer=lambda params: torch.optim.Adam(params, lr=1e-3), loss=torch.nn.MSELoss(),
        feature_cols=["x"], label_cols=["y"], batch_size=256, epochs=2, num_proc=2, verbose=0, callbacks=[Times()],
    )  # fmt: skip
    df = spark.read.parquet(data)
    times, start = {"called": time.time()}, SparkBackend.run

    def noted(*args: Any, **kwargs: Any) -> Any:
        times["run"] = time.time()
        return start(*args, **kwargs)

    SparkBackend.run = noted  # type: ignore[method-assign]
    estimator.fit(df)
    with open(f"{data}.times") as file:
        return {**times, **json.load(file)}


def distributor(spark: Any, _: str) -> dict[str, float]:
    torch_distributor(spark)
    return {}


FIRST: dict[str, Callable[[Any, str], dict[str, float]]] = {
    "bare barrier job": bare,
    "spark_hvd.run": run,
    "spark_hvd.run after warm_up": run,
    "TorchEstimator.fit": fit,
    "TorchEstimator.fit after warm_up": fit,
    "TorchDistributor": distributor,
}


def one_first(peer: str, data: str) -> dict[str, float]:
    """Seconds of a first run in this process, as a whole and by parts."""
    began = time.time()
    import psutil

    from spark_hvd.runner.channel.state import HubState
    from spark_hvd.runner.spark.private import items

    if FIRST[peer] is not bare:
        import spark_hvd

        spark_hvd.run  # noqa: B018 - as a program imports what it uses
    if FIRST[peer] is fit:
        import spark_hvd.estimators

        spark_hvd.estimators.TorchEstimator  # noqa: B018
    hellos = []
    handle = HubState.handle

    def noted(self: HubState, message: Any, now: float) -> Any:
        if message["type"] == "hello":
            hellos.append(time.time())
        return handle(self, message, now)

    HubState.handle = noted  # type: ignore[method-assign]
    # What the kernel tells of the start of a process is off by up to a second, always the same.
    with subprocess.Popen(["sleep", "0.1"]) as process:
        off = psutil.Process(process.pid).create_time() - time.time()
    imported = time.time()
    spark = session()
    made = time.time()
    if peer.endswith("warm_up"):
        print(spark_hvd.warm_up(spark, num_proc=2), file=sys.stderr)
    called = time.time()
    times = FIRST[peer](spark, data)
    returned = time.time()
    seconds = {"imports": imported - began, "session": made - imported, "warm_up": called - made}
    called = times.get("called", called)
    seconds["total"] = returned - called
    if times:
        store = spark._jsc.sc().statusStore()
        last = max(items(store.jobsList(None)), key=lambda job: job.jobId())
        stage = store.lastStageAttempt(max(items(last.stageIds())))
        marks = [
            called,
            times.get("run", called),
            stage.submissionTime().get().getTime() / 1000,
            times.get("there") or max(hellos),
            times["forked"] - off if "forked" in times else 0.0,
            times.get("begun", 0.0),
            times["ended"],
            returned,
        ]
        for place in range(1, len(marks)):  # what a bare job does not have took no time
            marks[place] = max(marks[place], marks[place - 1])
        seconds |= {name: end - start for name, start, end in zip(PARTS, marks, marks[1:], strict=False)}
    spark.stop()
    return seconds


def write_data(path: str) -> None:
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    numbers = np.random.default_rng(0).standard_normal((ROWS, 20), np.float32)
    table = pa.table({"x": list(numbers), "y": numbers[:, 0] * numbers[:, 1]})
    os.mkdir(path)
    for part in range(4):
        pq.write_table(table.slice(part * ROWS // 4, ROWS // 4), f"{path}/{part}.parquet")


def first(runs: int, peers: list[str]) -> None:
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="startup-") as folder:
        write_data(f"{folder}/data")
        for _ in range(runs):
            for peer in peers:
                command = [sys.executable, "-m", "benchmarks.startup", "--one", peer, f"{folder}/data"]
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                found[peer].append(json.loads(done.stdout.splitlines()[-1]))
    base = statistics.median(each["total"] for each in found["bare barrier job"]) if "bare barrier job" in found else 0
    print("| first of a session | median s | min-max s | to a bare job | imports before s | session s | warm_up s |")
    print("|---|---|---|---|---|---|---|")
    middle = {
        peer: {key: statistics.median(one[key] for one in each) for key in each[0]} for peer, each in found.items()
    }
    for peer, each in found.items():
        totals, typical = [one["total"] for one in each], middle[peer]
        ratio = f"{typical['total'] / base:.2f}" if base else ""
        before = " | ".join(f"{typical[key]:.2f}" for key in ("imports", "session", "warm_up"))
        print(f"| {peer} | {typical['total']:.2f} | {min(totals):.2f}-{max(totals):.2f} | {ratio} | {before} |")
    print(f"\n| seconds of that | {' | '.join(PARTS)} |\n|---|{'---|' * len(PARTS)}")
    for peer, typical in middle.items():
        if PARTS[0] in typical:
            print(f"| {peer} | " + " | ".join(f"{typical[part]:.2f}" for part in PARTS) + " |")
    print()


# -- warm runs


def warm(runs: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds of runs after a run of the same launcher, and of runs after one of the other."""

    def timed(peer: str) -> float:
        started = time.perf_counter()
        PEERS[peer](spark)
        return time.perf_counter() - started

    spark = session()
    for peer in PEERS:
        timed(peer)
    after_own: dict[str, list[float]] = {peer: [] for peer in PEERS}
    after_other: dict[str, list[float]] = {peer: [] for peer in PEERS}
    for _ in range(runs):
        for peer in PEERS:
            after_other[peer].append(timed(peer))
            after_own[peer].append(timed(peer))
    spark.stop()
    return after_own, after_other


def table(title: str, seconds: dict[str, list[float]]) -> None:
    base = statistics.median(seconds["spark_hvd.run"])
    for peer, values in seconds.items():
        middle = statistics.median(values)
        print(f"| {title} | {peer} | {middle:.2f} | {min(values):.2f}-{max(values):.2f} | {middle / base:.1f} x |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--first", nargs="*", choices=list(FIRST), help="first runs only, of these launchers or of all")
    parser.add_argument("--one", nargs=2, metavar=("PEER", "DATA"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(one_first(*args.one)))
        return
    first(args.runs, args.first or list(FIRST))
    if args.first is not None:
        return
    print("| run | launcher | median s | min-max s | against spark_hvd |\n|---|---|---|---|---|")
    after_own, after_other = warm(args.runs)
    table("warm session, a run after a run", after_own)
    table("warm session, a run after another kind of job", after_other)


if __name__ == "__main__":
    main()
