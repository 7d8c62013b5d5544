"""Rows a second through a trained model: TorchModel.transform, one row per forward, and plain torch without Spark.

`python -m benchmarks.transform [--rows 1000000] [--rounds 3] [--kinds scalars array vector]`

All read the same Parquet file set with two processes and keep one number a row, which they add up. Workers are warm:
a first pass over few rows starts them and loads torch. Arrays are one list of numbers a row. Vectors are made of them
after reading (array_to_vector), which counts for the ways through Spark and not for plain torch. "No model" is what
Spark needs to bring the columns to Python and zeros back; that and plain torch, added up, is what two busy cores allow.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from pyspark.ml.functions import array_to_vector, vector_to_array
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from torch import nn
from torch.multiprocessing.spawn import spawn

from benchmarks.common import session
from spark_hvd.estimators.torch.model import TorchModel
from spark_hvd.estimators.training.packing import pack, unpack

MINUTES = 2
CORES, WIDTH, BATCH = 2, 20, 1024
KINDS = ("scalars", "array", "vector")
WAYS = ("transform", "no model", "one row per forward", "plain torch")
LIMIT = "no model, and plain torch"
NAMES = [f"x{i}" for i in range(WIDTH)]


class Stacked(nn.Module):
    """The net for inputs of one number each."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, *columns: torch.Tensor) -> torch.Tensor:
        """Each column (rows,) -> (rows, 1)."""
        return self.net(torch.stack(columns, 1))


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)
    )  # fmt: skip


def _write(folder: Path, rows: int) -> None:
    """Two Parquet files of 20 float columns, and of the same in one list."""
    generator = np.random.default_rng(0)
    for kind in ("array", "scalars"):
        (folder / kind).mkdir()
    for part in range(CORES):
        values = generator.standard_normal((rows // CORES, WIDTH), np.float32)
        table = pa.table({name: values[:, i] for i, name in enumerate(NAMES)})
        pq.write_table(table, folder / "scalars" / f"{part}.parquet")
        offsets = np.arange(0, values.size + 1, WIDTH, dtype=np.int32)
        lists = pa.ListArray.from_arrays(pa.array(offsets), pa.array(values.ravel()))
        pq.write_table(pa.table({"features": lists}), folder / "array" / f"{part}.parquet")


def _timed(work: Callable[[], float]) -> tuple[float, float]:
    start = time.perf_counter()
    total = work()
    return time.perf_counter() - start, total


def _ours(frame: DataFrame, kind: str) -> float:
    names = NAMES if kind == "scalars" else ["features"]
    net = Stacked(_net()) if kind == "scalars" else _net()
    model = TorchModel(model=net, feature_columns=names, label_columns=["y"], loss=nn.MSELoss(), batch_size=BATCH)
    row = model.transform(frame).agg(F.sum("prediction")).first()
    assert row is not None
    return float(row[0])


def _no_model(frame: DataFrame, kind: str) -> float:
    """The columns to Python, and zeros back."""

    def zeros(features: pa.Array) -> pa.Array:
        return pa.array(np.zeros(len(features)))

    vector = vector_to_array(F.col("features"), "float32")
    columns = [F.col(name) for name in NAMES] if kind == "scalars" else [vector if kind == "vector" else "features"]
    udf: Any = F.arrow_udf(zeros, "double")  # type: ignore[attr-defined] # new in Spark 4.1
    row = frame.select(udf(F.struct(*columns)).alias("zero")).agg(F.sum("zero")).first()
    assert row is not None
    return float(row[0])


def _row_by_row(frame: DataFrame, kind: str) -> float:
    """How Horovod's TorchModel does it."""
    packed = pack(_net())

    def predict(rows: Iterable[Row]) -> Iterable[float]:
        torch.set_num_threads(1)
        net = unpack(packed).eval()
        for row in rows:
            values: Any = [row[name] for name in NAMES] if kind == "scalars" else row["features"]
            values = values.toArray() if kind == "vector" else values
            with torch.no_grad():
                yield float(net(torch.tensor(np.array([values]), dtype=torch.float32)))

    return float(frame.rdd.mapPartitions(predict).sum())


def _plain_process(rank: int, files: str, results: Any, start: Any) -> None:
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
    torch.set_num_threads(1)
    net, total = _net().eval(), 0.0
    start.wait()
    began = time.perf_counter()
    with torch.inference_mode():
        for batch in pq.ParquetFile(f"{files}/{rank}.parquet").iter_batches(BATCH):
            if batch.num_columns == 1:
                rows = torch.from_numpy(batch.column(0).flatten().to_numpy()).view(-1, WIDTH)
            else:
                rows = torch.from_numpy(np.stack([column.to_numpy() for column in batch.columns], 1))
            total += float(net(rows).double().sum())
    results[2 * rank : 2 * rank + 2] = torch.tensor([time.perf_counter() - began, total], dtype=torch.float64)


def _plain(files: Path) -> tuple[float, float]:
    """Seconds without the start of the processes, and the sum."""
    results = torch.zeros(2 * CORES, dtype=torch.float64).share_memory_()
    barrier = torch.multiprocessing.get_context("spawn").Barrier(CORES)
    spawn(_plain_process, args=(str(files), results, barrier), nprocs=CORES)
    return float(results[0::2].max()), float(results[1::2].sum())


def _measure(spark: SparkSession, folder: Path, kind: str, rows: int, rounds: int, fraction: float) -> None:
    files = folder / ("scalars" if kind == "scalars" else "array")
    frame = spark.read.parquet(str(files))
    if kind == "vector":
        frame = frame.select(array_to_vector(F.col("features")).alias("features"))
    few = frame.limit(int(rows * fraction)).repartition(CORES).cache()
    few.count()
    _ours(frame.limit(5000), kind), _no_model(frame.limit(5000), kind), _row_by_row(few.limit(100), kind)
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(rounds):
        seconds, mine = _timed(lambda: _ours(frame, kind))
        times["transform"].append(seconds)
        times["no model"].append(_timed(lambda: _no_model(frame, kind))[0])
        times["one row per forward"].append(_timed(lambda: _row_by_row(few, kind))[0] / fraction)
        seconds, theirs = _plain(files)
        times["plain torch"].append(seconds)
        assert abs(mine - theirs) < 1e-3 * rows, (mine, theirs)
    few.unpersist()
    times[LIMIT] = [sum(both) for both in zip(times["no model"], times["plain torch"], strict=True)]
    print(
        f"\n{rows:,} rows, {kind} ({WIDTH} float32)\n| | s | rows/s | transform is x times as fast |\n|---|---|---|---|"
    )
    for name, each in times.items():
        ratio = statistics.median(other / mine for other, mine in zip(each, times["transform"], strict=True))
        seconds = statistics.median(each)
        note = f" (from {fraction:.1%} of the rows)" if name.startswith("one") else ""
        print(f"| {name}{note} | {seconds:.2f} | {rows / seconds:,.0f} | {ratio:.2f} |", flush=True)


def main() -> None:
    """Measure and print one table a kind of column."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--fraction", type=float, default=0.002, help="of the rows for one row per forward")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write(folder, arguments.rows)
        spark = session(CORES, {"spark.driver.memory": "2g"})
        for kind in arguments.kinds:
            _measure(spark, folder, kind, arguments.rows, arguments.rounds, arguments.fraction)
        spark.stop()


if __name__ == "__main__":
    main()
