"""Rows a second by spark_hvd.predict and by PySpark's predict_batch_udf: fixed shapes and texts of many lengths.

`python -m benchmarks.inference [--rows 1000000] [--texts 8000] [--rounds 3] [--kinds numbers wide texts pictures]`

Both have the same model, the same batch size, one thread a task, and workers that are warm: a first pass over few rows
starts them and loads torch. In each round each has a turn. "numbers" are 20 float32 into an MLP with one output, "wide"
are 784 float32 into an embedding of 128. "texts" have 3 to 250 words, log-normal with a median of 30; a function makes
ids of the words and pads a batch, a Transformer of two layers makes an embedding of 128 of them. "pictures" are bytes
that take 5 ms to decode, for a convolutional network that takes about as long: one task, which leaves a core idle.
"fetched" are pictures for which a function waits 5 ms instead, as for a store, by a task on each core.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from pyspark.ml.functions import predict_batch_udf
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import ArrayType, FloatType
from torch import nn

import spark_hvd
from benchmarks.common import session

MINUTES = 2.5
CORES, WORDS, WIDTH = 2, 1 << 13, 128
KINDS = {
    "numbers": (20, 1, 1024),
    "wide": (784, WIDTH, 256),
    "texts": (0, WIDTH, 32),
    "pictures": (0, 1, 16),
    "fetched": (0, 1, 16),
}
"""Numbers in a row (0 if a function makes tensors), numbers of the output, rows of a batch."""
DECODING = 0.005
"""Seconds to decode or fetch a picture."""
SIDE = 64


class TextEncoder(nn.Module):
    """Word ids (rows, words), 0 for padding, to the mean of what a Transformer makes of them: (rows, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        there = ids != 0
        found = self.layers(self.words(ids), src_key_padding_mask=~there)
        return (found * there.unsqueeze(-1)).sum(1) / there.sum(1, keepdim=True)


def ids_of(texts: list[str]) -> torch.Tensor:
    """Ids of the words, padded to the longest of these texts."""
    ids = [[1 + zlib.crc32(word.encode()) % (WORDS - 1) for word in text.split()] for text in texts]
    longest = max(map(len, ids))
    return torch.tensor([each + [0] * (longest - len(each)) for each in ids])


def pixels_of(pictures: list[bytes]) -> torch.Tensor:
    """Decode pictures to (rows, 3, SIDE, SIDE), which keeps a core busy."""
    count = 3 * SIDE * SIDE
    decoded = [np.frombuffer(zlib.decompress(each), np.uint8, count).copy() for each in pictures]
    return torch.from_numpy(np.stack(decoded)).view(-1, 3, SIDE, SIDE).float() / 255


def fetched(pictures: list[bytes]) -> torch.Tensor:
    """Fetch pictures, which takes time but no core."""
    time.sleep(DECODING * len(pictures))
    return pixels_of(pictures)


COLLATES: dict[str, Callable[[Any], torch.Tensor]] = {"texts": ids_of, "pictures": pixels_of, "fetched": fetched}


def _net(kind: str, channels: int) -> nn.Module:
    torch.manual_seed(0)
    inputs, outputs, _ = KINDS[kind]
    if kind == "texts":
        return TextEncoder()
    if not inputs:
        layers = [nn.Conv2d(3, channels, 3, 2, 1), nn.ReLU(), nn.Conv2d(channels, channels, 3, 1, 1), nn.ReLU()]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1))
    return nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, outputs))


def _picture(seconds: float) -> bytes:
    """A few bytes that take that long to decode."""
    sample = bytes(8 << 20)
    packed = zlib.compress(sample)
    times = []
    for _ in range(9):
        start = time.process_time()
        zlib.decompress(packed)
        times.append(time.process_time() - start)
    return zlib.compress(bytes(max(3 * SIDE * SIDE, int(seconds / min(times) * len(sample)))))


def _write(path: Path, kind: str, rows: int) -> None:
    """Parquet files with a column x, one for each task."""
    generator = np.random.default_rng(0)
    width = KINDS[kind][0]
    path.mkdir()
    tasks = 1 if kind == "pictures" else CORES
    for part in range(tasks):
        count = rows // tasks
        if kind in ("pictures", "fetched"):
            picture = _picture(DECODING if kind == "pictures" else 0.0)
            column: Any = pa.array([picture] * count)
        elif width:
            values = generator.standard_normal((count, width), np.float32)
            offsets = np.arange(0, values.size + 1, width, dtype=np.int32)
            column = pa.ListArray.from_arrays(pa.array(offsets), pa.array(values.ravel()))
        else:
            lengths = np.exp(generator.normal(np.log(30), 0.8, count)).astype(int).clip(3, 250)
            column = pa.array([" ".join(map(str, generator.integers(0, 9000, length))) for length in lengths])
        pq.write_table(pa.table({"x": column}), path / f"{part}.parquet")


def _total(frame: DataFrame, output: int) -> float:
    """Adds up the predictions, so that they come back to Spark."""
    value = F.col("prediction") if output == 1 else F.aggregate("prediction", F.lit(0.0), lambda a, b: a + b)
    row = frame.agg(F.sum(value)).first()
    assert row is not None
    return float(row[0])


def _ours(frame: DataFrame, kind: str, channels: int) -> float:
    _, outputs, batch = KINDS[kind]
    found = spark_hvd.predict(
        frame,
        _net(kind, channels),
        columns="x",
        collate=COLLATES.get(kind),
        outputs="float" if outputs == 1 else "array<float>",
        batch_size=batch,
    )
    return _total(found, outputs)


def _theirs(frame: DataFrame, kind: str, channels: int) -> float:
    """As the documentation of predict_batch_udf has it."""
    inputs, outputs, batch = KINDS[kind]
    net = _net(kind, channels)

    def make() -> Callable[[Any], Any]:
        torch.set_num_threads(1)
        model = net.eval()

        def predict(x: Any) -> Any:
            with torch.inference_mode():
                found = model(torch.from_numpy(x) if inputs else COLLATES[kind](x.tolist()))
            return found.squeeze(1).numpy() if outputs == 1 else found.numpy()

        return predict

    udf: Any = predict_batch_udf(
        make,
        return_type=FloatType() if outputs == 1 else ArrayType(FloatType()),
        batch_size=batch,
        input_tensor_shapes=[[inputs]] if inputs else None,
    )
    return _total(frame.select(udf("x").alias("prediction")), outputs)


def _limit(frame: DataFrame, kind: str, channels: int) -> str:
    """The time of a row for decoding and computing, and the best possible gain if both overlap."""
    torch.set_num_threads(1)
    row = frame.first()
    assert row is not None
    batch, net = [row.x] * KINDS[kind][2], _net(kind, channels).eval()
    parts: list[list[float]] = [[], []]
    with torch.inference_mode():
        for _ in range(9):
            start = time.perf_counter()
            tensor = COLLATES[kind](batch)
            made = time.perf_counter()
            net(tensor)
            parts[0].append(made - start)
            parts[1].append(time.perf_counter() - made)
    decode, model = (1e3 * statistics.median(part) / len(batch) for part in parts)
    limit = (decode + model) / max(decode, model)
    return (
        f"; a row is decoded in {decode:.1f} ms and computed in {model:.1f}, so both at once are {limit:.2f} x as fast"
    )


def _measure(frame: DataFrame, kind: str, rows: int, rounds: int, channels: int) -> None:
    ways = {"predict": _ours, "predict_batch_udf": _theirs}
    for work in ways.values():
        work(
            frame.sample(fraction=100 / rows, seed=0), kind, channels
        )  # of each file, so that both workers have loaded torch
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        totals = []
        for name in ways if number % 2 == 0 else reversed(ways):
            start = time.perf_counter()
            totals.append(ways[name](frame, kind, channels))
            times[name].append(time.perf_counter() - start)
        assert abs(totals[0] - totals[1]) < 1e-3 * rows, totals
    ratios = [theirs / ours for ours, theirs in zip(*times.values(), strict=True)]
    print(f"\n{kind}, {rows:,} rows, batches of {KINDS[kind][2]}\n| | s | rows/s |\n|---|---|---|")
    for name, each in times.items():
        print(f"| {name} | {statistics.median(each):.2f} | {rows / statistics.median(each):,.0f} |")
    each_round = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    limit = _limit(frame, kind, channels) if kind in ("pictures", "fetched") else ""
    print(f"predict is {statistics.median(ratios):.2f} x as fast (rounds: {each_round}){limit}", flush=True)


def main() -> None:
    """Measure and print one table a kind of column."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000, help="of numbers; a tenth of it where they are wide")
    parser.add_argument("--texts", type=int, default=8_000)
    parser.add_argument("--pictures", type=int, default=1_000)
    parser.add_argument(
        "--channels", type=int, default=96, help="channels of the network for pictures; 96 take 5 ms a row"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    arguments = parser.parse_args()
    counts = {"numbers": arguments.rows, "wide": arguments.rows // 10, "texts": arguments.texts}
    counts |= {"pictures": arguments.pictures, "fetched": arguments.pictures}
    with tempfile.TemporaryDirectory() as name:
        spark = session(CORES, {"spark.driver.memory": "2g"})
        for kind in arguments.kinds:
            _write(Path(name, kind), kind, counts[kind])
            _measure(
                spark.read.parquet(str(Path(name, kind))), kind, counts[kind], arguments.rounds, arguments.channels
            )
        spark.stop()


if __name__ == "__main__":
    main()
