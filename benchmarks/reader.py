"""Rows per second of the Arrow reader, beside a bare scan by pyarrow and Petastorm's loader, and its peak memory.

200,000 rows of 20 float32 columns and an int64 label in 8 files with row groups of 5,000. Rounds alternate.

`python -m benchmarks.reader [--rounds 9] [--rows 200000] [--workers 2] [--memory]`
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import torch

from spark_hvd.data.column_form import ColumnForm
from spark_hvd.data.columns import torch_batch
from spark_hvd.data.readers.arrow import ArrowReader
from spark_hvd.data.readers.blocks import TensorForm
from spark_hvd.data.readers.dataset import Column, DatasetMeta, RowGroup
from spark_hvd.data.readers.forms import Form
from spark_hvd.data.readers.reader import ReaderSpec
from spark_hvd.data.readers.sharding import Position
from spark_hvd.estimators.training.inputs import TensorSpec, tensors_of
from spark_hvd.store import Store

MINUTES = 2
FEATURES = [f"f{number}" for number in range(20)]
NAMES = (*FEATURES, "label")
FILES, GROUP = 8, 5000
WINDOW = 20_000
"""Rows that are shuffled together, by us and by Petastorm's queue."""
CPU = torch.device("cpu")
SCAN = "pyarrow.dataset scan, no tensors"
Pass = Callable[[int], int]
"""Reads pass number so-and-so, returns the number of rows."""
Rounds = dict[str, list[float]]


def _write(folder: Path, rows: int) -> DatasetMeta:
    random, groups = np.random.default_rng(0), []
    for number in range(FILES):
        count = rows // FILES
        features = {name: random.standard_normal(count, np.float32) for name in FEATURES}
        file = folder / "data" / f"part-{number}.parquet"
        file.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(features | {"label": random.integers(0, 10, count)}), file, row_group_size=GROUP)
        sizes = [min(GROUP, count - start) for start in range(0, count, GROUP)]
        groups += [RowGroup(str(file), index, size) for index, size in enumerate(sizes)]
    columns = (*(Column(name, "float32") for name in FEATURES), Column("label", "int64"))
    return DatasetMeta(str(folder / "data"), columns, tuple(groups))


def _by_column(batches: Iterable[Any]) -> int:
    rows = 0
    for batch in batches:
        for name in NAMES:
            tensor = batch[name]
        rows += len(tensor)
    return rows


def _ours(
    meta: DatasetMeta,
    batch_size: int,
    count: Callable[[Iterable[Any]], int] = _by_column,
    form: Callable[[ReaderSpec], Form[Any, Any]] = TensorForm,
    **spec: Any,
) -> Pass:
    store, sharding = (
        Store.create(str(Path(meta.url).parent)),
        meta.sharding(batch_size, shuffle=spec.get("shuffle", False)),
    )
    asked = ReaderSpec(dataset=meta, columns=NAMES, store=store, **spec)
    reader = ArrowReader(asked, form(asked))
    share, sizes = sharding.share(Position(), 0, 1), sharding.batches(Position(), 0, 1)
    return lambda number: count(reader.batches(number, share, sizes))


def _stacked(meta: DatasetMeta, batch_size: int, **spec: Any) -> Pass:
    """What an estimator makes of the same batches for a model that gets its columns side by side."""
    specs, spec["stack"] = [TensorSpec(meta.column(name), stacked=True) for name in FEATURES], tuple(FEATURES)

    def count(batches: Iterable[Any]) -> int:
        return sum(len(tensors_of(specs, batch, CPU)[0]) for batch in batches)

    return _ours(meta, batch_size, count, **spec)


def _loader(meta: DatasetMeta, batch_size: int, **spec: Any) -> Pass:
    """The batches of ``torch_batches``."""
    return _ours(meta, batch_size, form=lambda _: ColumnForm(torch_batch, None, torch.cat), **spec)


def _scan(meta: DatasetMeta) -> Pass:
    return lambda _: sum(batch.num_rows for batch in pyarrow.dataset.dataset(meta.url).to_batches())


def _petastorm(meta: DatasetMeta, workers: int, batch_size: int, queue: int) -> Pass:
    from spark_hvd.estimators.petastorm.bridge import install

    install()
    from petastorm import make_batch_reader
    from petastorm.pytorch import BatchedDataLoader

    def run(_: int) -> int:
        reader = make_batch_reader(
            f"file://{meta.url}", num_epochs=1, workers_count=workers, shuffle_row_groups=queue > 0
        )
        with BatchedDataLoader(reader, batch_size, shuffling_queue_capacity=queue) as loader:
            return _by_column(loader)

    return run


def _measure(passes: dict[str, Pass], rows: int, rounds: int) -> tuple[Rounds, Rounds]:
    """Microseconds for a thousand rows, of wall-clock time and of all threads' CPU time, by pass and round."""
    wall: Rounds = {name: [] for name in passes}
    cpu: Rounds = {name: [] for name in passes}
    for number in range(-1, rounds):  # the first warms up
        for name in list(passes)[:: 1 if number % 2 else -1]:
            gc.collect()
            start = time.perf_counter(), time.process_time()
            seen = passes[name](max(number, 0))
            spent = time.perf_counter() - start[0], time.process_time() - start[1]
            assert seen == rows, f"{name} gave {seen} of {rows} rows"
            if number >= 0:
                wall[name].append(1e9 * spent[0] / rows)
                cpu[name].append(1e9 * spent[1] / rows)
    return wall, cpu


def _report(title: str, wall: Rounds, cpu: Rounds, bases: list[str]) -> None:
    header = "".join(f" x {base} |" for base in bases)
    print(f"\n{title}\n\n| | M rows/s |{header} CPU us / 1,000 rows |\n|---|---|{'---|' * len(bases)}---|")
    for name, mine in wall.items():
        row = f"| {name} | {1000 / statistics.median(mine):.2f} |"
        for base in bases:
            by_round = [b / a for a, b in zip(mine, wall[base], strict=True)]
            row += f" {statistics.median(by_round):.2f} ({min(by_round):.2f} to {max(by_round):.2f}) |"
        print(f"{row} {statistics.median(cpu[name]):.0f} |", flush=True)


def _speed(rows: int, rounds: int, workers: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        meta = _write(Path(folder), rows)
        for batch_size, shuffle in ((1000, False), (1000, True), (64, False), (64, True)):
            spec: dict[str, Any] = {"batch_size": batch_size, "shuffle": shuffle, "workers": workers}
            spec["window_rows"] = WINDOW
            passes = {
                SCAN: _scan(meta),
                "spark_hvd": _ours(meta, **spec),
                "spark_hvd, columns stacked by an estimator": _stacked(meta, **spec),
                "spark_hvd, torch_batches": _loader(meta, **spec),
            }
            bases = [SCAN]
            try:
                passes["Petastorm"] = _petastorm(meta, workers, batch_size, WINDOW if shuffle else 0)
                bases.append("Petastorm")
            except Exception as error:  # ours is worth measuring without it
                print(f"Petastorm is left out: {type(error).__name__}: {error}")
            order = "rows shuffled" if shuffle else "order of the files"
            _report(f"batches of {batch_size}, {order}", *_measure(passes, rows, rounds), bases)


def _memory(rows: int) -> None:
    """Peak memory on this many rows and on ten times as many, each in a process of its own."""
    print("\n| windows of 20,000 rows, batches of 1,000 | rows | peak MiB | of it for reading |\n|---|---|---|---|")
    for shuffle in (False, True):
        peaks = []
        for count in (rows, 10 * rows):
            with tempfile.TemporaryDirectory() as folder:
                data = json.dumps(_write(Path(folder), count).to_json())
                command = [sys.executable, "-m", "benchmarks.reader", "--peak-of", str(int(shuffle))]
                ran = subprocess.run(command, input=data, capture_output=True, text=True, check=True)
            before, after = map(float, ran.stdout.split())
            peaks.append(after)
            order = "shuffled" if shuffle else "order of the files"
            print(f"| {order} | {count:,} | {after:.0f} | {after - before:.0f} |", flush=True)
        print(f"| ten times the rows | | {100 * (peaks[1] / peaks[0] - 1):+.1f} % | |")


def _peak(data: str, shuffle: bool) -> None:
    """Print the peak memory of this process before and after two passes."""
    meta = DatasetMeta.from_json(json.loads(data))
    before = _resident()
    read = _ours(meta, batch_size=1000, shuffle=shuffle, window_rows=WINDOW)
    for number in range(2):
        assert read(number) == meta.rows
    print(before, _resident())


def _resident() -> float:
    """Peak _resident memory of this process in MiB; of its own life, not of the process that started it."""
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def main() -> None:
    """Measure and print one table a way of reading, then one of the memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--memory", action="store_true", help="measure memory only")
    parser.add_argument("--peak-of", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    pa.set_cpu_count(os.cpu_count() or 1)  # not OMP_NUM_THREADS, which others set for torch
    if arguments.peak_of is not None:
        _peak(sys.stdin.read(), bool(arguments.peak_of))
        return
    if not arguments.memory:
        _speed(arguments.rows, arguments.rounds, arguments.workers)
    _memory(arguments.rows)


if __name__ == "__main__":
    main()
