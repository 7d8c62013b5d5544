"""Windows over series a second in one rank: spark_hvd's loader beside the bare gather and a Dataset of windows.

`python -m benchmarks.windows [--rounds 5] [--series 50] [--rows 8760] [--length 192] [--batch 256]`

The ways take turns over the same windows, each shuffled. The bare gather has all values in one array and copies windows
out of it; a Dataset gives PyTorch's DataLoader one window at a time, which collates them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.common import in_turns
from spark_hvd.data import Windows
from spark_hvd.runner import Reporting, run_local

MINUTES = 1
BARE, OURS, ITEMS = "numpy's sliding_window_view, bare gather", "spark_hvd, torch_batches", "DataLoader over a Dataset"


class _Items(Dataset[torch.Tensor]):
    """A window an item."""

    def __init__(self, values: torch.Tensor, length: int) -> None:
        self._values, self._length = values, length
        self._each = values.shape[1] - length + 1

    def __len__(self) -> int:
        return len(self._values) * self._each

    def __getitem__(self, number: int) -> torch.Tensor:
        series, start = divmod(number, self._each)
        return self._values[series, start : start + self._length]


def _bare(values: np.ndarray[Any, Any], length: int, batch: int) -> Iterator[torch.Tensor]:
    windows = np.lib.stride_tricks.sliding_window_view(values, length, axis=1)
    order = np.random.default_rng(0).permutation(windows.shape[0] * windows.shape[1])
    for at in range(0, len(order), batch):
        yield torch.from_numpy(windows[np.divmod(order[at : at + batch], windows.shape[1])])


def _in_rank(given: argparse.Namespace, values: np.ndarray[Any, Any]) -> dict[str, list[float]]:
    import spark_hvd.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    shard = hvd.get_dataset_shard("train")
    loader = shard.torch_batches(given.batch, shuffle=True, columns=["value"])
    items = DataLoader(_Items(torch.from_numpy(values), given.length), given.batch, shuffle=True)
    ways: dict[str, Callable[[], Iterator[torch.Tensor]]] = {
        BARE: lambda: _bare(values, given.length, given.batch),
        OURS: lambda: (batch["value"] for batch in loader),
        ITEMS: lambda: iter(items),
    }

    def speed(name: str) -> float:
        began = time.perf_counter()
        windows = sum(len(batch) for batch in ways[name]())
        assert windows == shard.rows
        return windows / (time.perf_counter() - began)

    return in_turns([*ways], given.rounds, speed, warm_up=1)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--series", type=int, default=50)
    parser.add_argument("--rows", type=int, default=8760, help="of each series")
    parser.add_argument("--length", type=int, default=192, help="of a window")
    parser.add_argument("--batch", type=int, default=256)
    given = parser.parse_args()
    values = np.random.default_rng(0).random((given.series, given.rows), np.float32)
    keys = np.repeat(np.arange(given.series), given.rows)
    times = np.tile(np.arange(given.rows), given.series)
    table = pa.table({"series": keys, "time": times, "value": values.reshape(-1)})
    windows = Windows(table, keys=["series"], order_by="time", columns=["value"], length=given.length)
    (found,) = run_local(
        _in_rank, (given, values), num_proc=1, data={"train": windows}, reporting=Reporting(progress="off")
    )
    print("| windows | a second | of the bare gather | by round |\n|---|---|---|---|")
    for name, speeds in found.items():
        ratios = [speed / bare for speed, bare in zip(speeds, found[BARE], strict=True)]
        middle = f"{statistics.median(speeds):,.0f} | {statistics.median(ratios):.2f}"
        print(f"| {name} | {middle} | {min(ratios):.2f}-{max(ratios):.2f} |")


if __name__ == "__main__":
    main()
