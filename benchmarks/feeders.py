"""How long ranks wait for rows that a function makes: in their loop, in threads of theirs, and with feeders.

Two ranks take batches of 32 rows of a Parquet file of JPEGs, 320 x 320 pixels; a step is a sleep that stands for a
GPU's. Each way is measured in an epoch, after one that is left early. Twice:

- decoded here: Pillow decodes, on the cores that there are. Where these are two, feeders have no other cores than the
  ranks have.
- decoded elsewhere: a sleep of 30 ms an image stands for decoding, one call at a time in a process, as if each process
  had one other core for it: eight feeders have eight, whatever this machine has. What goes to and fro is as large as
  JPEGs and pixels are, 224 x 224.

`python -m benchmarks.feeders [--feeders 8] [--rounds 2] [--images 640] [--only elsewhere]`
"""

from __future__ import annotations

import argparse
import io
import os
import statistics
import tempfile
import threading
import time
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import spark_hvd
from benchmarks.common import session
from spark_hvd.data import Mapped

MINUTES = 2.5
BATCH, PIXELS, IMAGE_SECONDS, DIFFERENT = 32, 320, 0.03, 128
STEPS = {"here": 0.1, "elsewhere": 0.45}
"""Seconds of a step, which sleeps."""
_cores: dict[str, threading.Lock] = {}
"""Of this process: empty when functions are pickled, since locks cannot be."""


def write_images(path: str, rows: int) -> float:
    """Make JPEGs of soft colours with some noise; returns the kilobytes of one."""
    from PIL import Image

    random, jpegs = np.random.default_rng(0), []
    for _ in range(DIFFERENT):
        soft = Image.fromarray(random.integers(0, 256, (20, 20, 3), np.uint8)).resize((PIXELS, PIXELS))
        noisy = np.asarray(soft).astype(np.int16) + random.integers(-8, 9, (PIXELS, PIXELS, 3))
        file = io.BytesIO()
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=85)
        jpegs.append(file.getvalue())
    repeated = [jpegs[number % DIFFERENT] for number in range(rows)]
    pq.write_table(pa.table({"jpeg": repeated, "label": range(rows)}), path, row_group_size=128)
    return sum(map(len, jpegs)) / DIFFERENT / 1000


def decode(rows: pa.RecordBatch) -> dict[str, Any]:
    """Images as pixels."""
    from PIL import Image

    images = [np.asarray(Image.open(io.BytesIO(each))) for each in rows.column("jpeg").to_pylist()]
    return {"image": np.stack(images), "label": rows.column("label")}


def decode_elsewhere(rows: pa.RecordBatch) -> dict[str, Any]:
    """Pixels, after as long as something else would take to decode them, one call at a time."""
    core = _cores.setdefault("the other one", threading.Lock())
    with core:
        time.sleep(IMAGE_SECONDS * rows.num_rows)
    return {"image": np.zeros((rows.num_rows, 224, 224, 3), np.uint8), "label": rows.column("label")}


def train(step: float, in_loop: Any) -> tuple[float, float, list[int]]:
    """The share of an epoch in which a rank waits for data, its batches a second, and its rows."""
    import torch

    import spark_hvd.torch as hvd

    def collated(rows: pa.RecordBatch) -> dict[str, torch.Tensor]:
        return {name: torch.as_tensor(np.asarray(values)) for name, values in in_loop(rows).items()}

    shard = hvd.get_dataset_shard("train")
    loader = shard.torch_batches(BATCH, shuffle=True, collate_fn=None if in_loop is None else collated)
    for only in (3, len(loader)):
        hvd.barrier()
        labels: list[int] = []
        waited, began = 0.0, time.perf_counter()
        batches = iter(loader)
        for _ in range(only):
            asked = time.perf_counter()
            batch = next(batches)
            waited += time.perf_counter() - asked
            labels += batch["label"].tolist()
            time.sleep(step)
        took = time.perf_counter() - began
    return waited / took, len(loader) / took, labels


def measure(kind: str, path: str, rows: int, feeders: int, rounds: int, spark: Any) -> None:
    """Print a table."""
    function, step = (decode if kind == "here" else decode_elsewhere), STEPS[kind]
    mapped = Mapped(path, function, rows_at_once=4)
    ways: dict[str, dict[str, Any]] = {
        "in the loop (collate_fn)": {"data": {"train": path}, "args": (step, function)},
        "two threads of the rank (Mapped)": {"data": {"train": mapped}, "args": (step, None)},
        f"{feeders} feeders": {"data": {"train": mapped}, "args": (step, None), "feeders": feeders},
    }
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, options in ways.items():
            ranks = spark_hvd.run(train, num_proc=2, verbose=0, spark=spark, **options)
            assert sorted(ranks[0][2] + ranks[1][2]) == list(range(rows))
            found[way].append((statistics.mean(each[0] for each in ranks), sum(each[1] for each in ranks) * BATCH))
    print(f"\ndecoded {kind}: {rows} images, a step sleeps {step * 1000:.0f} ms, load {os.getloadavg()[0]:.1f}\n")
    print("| | waits for data | range | images/s |\n|---|---|---|---|")
    for way, results in found.items():
        shares, rates = zip(*results, strict=True)
        spread = f"{min(shares):.1%} to {max(shares):.1%}"
        print(f"| {way} | {statistics.median(shares):.1%} | {spread} | {statistics.median(rates):.0f} |", flush=True)


def main() -> None:
    """Measure both kinds of decoding."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--feeders", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--images", type=int, default=640)
    parser.add_argument("--only", choices=STEPS, help="where images are decoded; by default both are measured")
    arguments = parser.parse_args()
    spark = session(2 + arguments.feeders)
    with tempfile.TemporaryDirectory() as folder:
        path, rows = f"{folder}/images.parquet", arguments.images
        size = write_images(path, rows)
        print(f"{os.cpu_count()} cores; a JPEG has {size:.0f} kB, its pixels {3 * PIXELS**2 / 1000:.0f} kB", flush=True)
        cores = min(os.cpu_count() or 1, arguments.feeders)  # as many feeders, for what needs these
        for kind, feeders in (("elsewhere", arguments.feeders), ("here", cores)):
            if arguments.only in (None, kind):
                measure(kind, path, rows, feeders, arguments.rounds, spark)
    spark.stop()


if __name__ == "__main__":
    main()
