"""A DataFrame's way into two ranks on local[2], beside Spark's bare way, PySpark's loader and files read in place.

Rows of 20 float32 columns and an int64 label, from 8 Parquet files. Rates are of both ranks together, medians.

`python -m benchmarks.feed [--rounds 5] [--rows 1000000] [--memory]`
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq

import spark_hvd
from benchmarks.common import session

MINUTES = 2
FEATURES = [f"f{number}" for number in range(20)]
BATCH = 1000
BARE = "Spark's bare way: mapInArrow that counts"
Seconds = dict[str, float]


def write(folder: str, rows: int, files: int = 8) -> None:
    """Make the data set."""
    random = np.random.default_rng(0)
    Path(folder).mkdir()
    for number in range(files):
        columns = {name: random.standard_normal(rows // files, np.float32) for name in FEATURES}
        table = pa.table(columns | {"label": random.integers(0, 10, rows // files)})
        pq.write_table(table, f"{folder}/part-{number}.parquet", row_group_size=25_000)


def read(loader: Iterable[Any]) -> float:
    """Seconds of a pass."""
    began = time.perf_counter()
    rows = sum(len(batch["label"]) for batch in loader)
    assert rows
    return time.perf_counter() - began


def again(loader: Iterable[Any], epoch: int) -> float:
    """Seconds of a pass of a loader, which counts epochs itself."""
    return read(loader)


def scan(files: list[str]) -> float:
    """Seconds of a bare scan of some files; the bound of what can be read."""
    began = time.perf_counter()
    assert sum(batch.num_rows for batch in pyarrow.dataset.dataset(files).to_batches())
    return time.perf_counter() - began


def in_rank(folder: str, epochs: int) -> Seconds:
    """What each way takes a rank, the other rank at the same; its first pass with the time until its rows are there."""
    import torch

    import spark_hvd.torch as hvd
    from spark_hvd.data.parquet import dataset_of
    from spark_hvd.data.readers.arrow import ArrowReader
    from spark_hvd.data.readers.blocks import TensorForm
    from spark_hvd.data.readers.reader import ReaderSpec
    from spark_hvd.data.readers.sharding import Position
    from spark_hvd.store import Store

    torch.set_num_threads(1)
    hvd.init()
    began, store = time.perf_counter(), Store.create(folder)
    frame = hvd.get_dataset_shard("frame")
    frames = {shuffle: frame.torch_batches(BATCH, shuffle=shuffle, features=FEATURES) for shuffle in (False, True)}
    read(frames[False])
    found: defaultdict[str, list[float]] = defaultdict(list)
    found["DataFrame, first pass"].append(time.perf_counter() - began)
    files = hvd.get_dataset_shard("files")
    paths = {shuffle: files.torch_batches(BATCH, shuffle=shuffle, features=FEATURES) for shuffle in (False, True)}
    dataset = dataset_of(store, folder)
    mine, place = sorted(map(str, Path(folder).iterdir()))[hvd.rank() :: 2], (Position(), hvd.rank(), 2)
    columns = (*FEATURES, "label")
    readers = {}
    for shuffle in (False, True):
        spec = ReaderSpec(dataset=dataset, columns=columns, store=store, shuffle=shuffle, stack=tuple(FEATURES))
        readers[shuffle] = ArrowReader(spec, TensorForm(spec))

    def by_reader(shuffle: bool, epoch: int) -> float:
        sharding = dataset.sharding(BATCH, shuffle=shuffle)
        return read(readers[shuffle].batches(epoch, sharding.share(*place), sharding.batches(*place)))

    ways: dict[str, Callable[[int], float]] = {"pyarrow's scan of the files, no tensors": lambda _: scan(mine)}
    for shuffle, how in ((False, "in order"), (True, "shuffled")):
        ways[f"DataFrame, later passes, {how}"] = partial(again, frames[shuffle])
        ways[f"Parquet files, {how}"] = partial(again, paths[shuffle])
        ways[f"the estimators' reader, {how}"] = partial(by_reader, shuffle)
    for epoch in range(-1, epochs):  # the first warms up
        for name in list(ways)[:: 1 if epoch % 2 else -1]:
            hvd.barrier()
            spent = ways[name](max(epoch, 0))
            if epoch >= 0:
                found[name].append(spent)
    return {name: statistics.median(each) for name, each in found.items()}


def count(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Spark's bare way: rows come to Python as Arrow, and are counted."""
    yield pa.RecordBatch.from_pydict({"rows": [sum(batch.num_rows for batch in batches)]})


def pyspark_loader(spark: Any, folder: str, rows: int) -> float:
    """Seconds of a pass of PySpark's private loader of a partition."""

    def train(rows: int) -> float:
        from pyspark.ml.torch.distributor import _get_spark_partition_data_loader

        began = time.perf_counter()
        assert sum(len(batch[-1]) for batch in _get_spark_partition_data_loader(rows, BATCH, num_workers=0))
        return time.perf_counter() - began

    from pyspark.ml.torch.distributor import TorchDistributor

    df = spark.read.parquet(folder).repartition(2)
    distributor = TorchDistributor(num_processes=2, local_mode=False, use_gpu=False)
    return float(distributor._train_on_dataframe(train, df, rows // 2))


def wall(job: Callable[[], Any]) -> float:
    """Seconds."""
    began = time.perf_counter()
    job()
    return time.perf_counter() - began


def nothing() -> None:
    """A run that does nothing."""


def one_pass() -> float:
    """A run that reads its rows once, as they are."""
    import spark_hvd.torch as hvd

    hvd.init()
    return sum(batch.num_rows for batch in hvd.get_dataset_shard("frame").arrow_batches(BATCH))


def speed(rows: int, rounds: int) -> None:
    """Print the table of rates."""
    from spark_hvd.runner.spark.input import InputRows

    spark = session()
    with tempfile.TemporaryDirectory() as parent:
        folder, small = f"{parent}/rows", f"{parent}/few"
        write(folder, rows)
        write(small, rows // 20)
        df = spark.read.parquet(folder)
        run = partial(spark_hvd.run, num_proc=2, spark=spark, verbose=0)
        seconds: defaultdict[str, list[float]] = defaultdict(list)
        for number in range(-1, rounds):
            began = time.perf_counter()
            InputRows.of({"frame": df}, 2)
            prepared = time.perf_counter() - began
            bare = wall(lambda: df.repartition(2).mapInArrow(count, "rows long", barrier=True).collect())
            empty = wall(lambda: run(nothing))
            whole = wall(lambda: run(one_pass, data={"frame": df}))
            ranks = run(in_rank, (folder, 1 if number < 0 else 3), data={"frame": df, "files": folder})
            if number < 0:
                continue
            seconds["prepared"].append(prepared)
            seconds[BARE].append(bare)
            seconds["the whole run that reads once, less one that does nothing"].append(whole - empty)
            for name in ranks[0]:
                seconds[name].append(max(rank[name] for rank in ranks))
        theirs = (rows // 20) / pyspark_loader(spark, small, rows // 20) / 1e6
    print(f"driver's time for the input of the stage: {statistics.median(seconds.pop('prepared')):.3f} s\n")
    print("| | M rows/s | range | x Spark's bare way |\n|---|---|---|---|")
    print(f"| PySpark's private loader, {rows // 20:,} rows | {theirs:.3f} | | |")
    bare_seconds = seconds[BARE]
    for name, each in seconds.items():
        rates = sorted(rows / spent / 1e6 for spent in each)
        ratio = statistics.median(theirs / mine for mine, theirs in zip(each, bare_seconds, strict=True))
        print(
            f"| {name} | {statistics.median(rates):.2f} | {rates[0]:.2f} to {rates[-1]:.2f} | {ratio:.2f} |", flush=True
        )


def peak(shuffle: bool) -> float:
    """Peak memory of a rank in MiB in two passes, without pages of files, which the system takes back at need."""
    import spark_hvd.torch as hvd

    hvd.init()
    loader = hvd.get_dataset_shard("frame").torch_batches(BATCH, shuffle=shuffle, features=FEATURES)
    most = 0
    for _ in range(2):
        for number, _ in enumerate(loader):
            if number % 10 == 0:
                with open("/proc/self/status") as status:
                    line = next(line for line in status if line.startswith("RssAnon"))
                most = max(most, int(line.split()[1]))
    return most / 1024


def memory(rows: int) -> None:
    """Print the peak memory of ranks for so many rows and for ten times as many."""
    spark = session()
    print("| | rows | peak MiB of a rank |\n|---|---|---|")
    for shuffle in (False, True):
        for many in (rows, 10 * rows):
            with tempfile.TemporaryDirectory() as parent:
                write(f"{parent}/rows", many)
                df = spark.read.parquet(f"{parent}/rows")
                peaks = spark_hvd.run(peak, (shuffle,), num_proc=2, spark=spark, data={"frame": df}, verbose=0)
            print(f"| {'shuffled' if shuffle else 'in order'} | {many:,} | {max(peaks):.0f} |", flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--memory", action="store_true", help="measure memory only")
    arguments = parser.parse_args()
    if arguments.memory:
        memory(arguments.rows)
    else:
        speed(arguments.rows, arguments.rounds)


if __name__ == "__main__":
    main()
