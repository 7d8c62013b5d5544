"""Time of a training step on two ranks: DistributedOptimizer beside DDP and no exchange, in the same processes.

They take turns in alternating rounds.

`python -m benchmarks.train_step [--rounds 7] [--steps 20] [--models cnn mlp many small] [--busy 0 2]`

With `--busy n`, n processes that compute without end compete for the cores while it is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import spark_hvd.torch as hvd
from benchmarks.common import in_turns, milliseconds_of
from spark_hvd import run_local

MINUTES = 3
BATCH = 32
BUSY = "import time\nend = time.monotonic() + 600\nwhile time.monotonic() < end:\n    sum(range(10_000))"
WARM_UP = 5
KINDS = ("no exchange", "DDP", "DDP, bucket views", "spark_hvd", "spark_hvd over Gloo")
Step = Callable[[], None]


class Chain(nn.Module):
    """500 tensors of 1,000 floats, each a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(1 + 0.01 * torch.randn(1000)) for _ in range(500)])

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply `rows` (batch, 1000) by every scale in turn."""
        for scale in self.scales:
            rows = rows * scale
        return rows


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 49, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def _mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(),
        nn.Linear(2048, 10),
    )  # fmt: skip


def _small() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "cnn": (_cnn, (BATCH, 1, 28, 28), 10),
    "mlp": (_mlp, (BATCH, 784), 10),
    "many": (Chain, (BATCH, 1000), 1000),
    "small": (_small, (256, 20), 0),  # as benchmarks/fit trains it: one output, Adam
}


def _make_step(name: str, kind: str, rank: int) -> Step:
    build, shape, classes = MODELS[name]
    torch.manual_seed(0)
    model = build()
    torch.manual_seed(rank)
    rows = torch.randn(shape)
    labels = torch.randint(0, classes, (BATCH,)) if classes else torch.randn(shape[0], 1)
    if kind.startswith("DDP"):
        model = DistributedDataParallel(model, gradient_as_bucket_view="views" in kind)
    optimizer: torch.optim.Optimizer
    if classes:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    if kind.startswith("spark_hvd"):
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), shared_memory="Gloo" not in kind)
    criterion = nn.CrossEntropyLoss() if classes else nn.MSELoss()

    def step() -> None:
        optimizer.zero_grad()
        criterion(model(rows), labels).backward()
        optimizer.step()

    return step


@contextlib.contextmanager
def _beside(busy: int) -> Iterator[None]:
    """Beside so many processes that compute without end (ten minutes at most)."""
    neighbours = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(busy)]
    try:
        yield
    finally:
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.wait()


def _measure(name: str, rounds: int, steps: int) -> dict[str, list[list[float]]]:
    """Milliseconds of each step, by kind and round."""
    torch.set_num_threads(1)
    runs = {kind: _make_step(name, kind, hvd.rank()) for kind in KINDS}
    for step in runs.values():
        for _ in range(WARM_UP):
            step()

    def measure(kind: str) -> list[float]:
        dist.barrier()
        return milliseconds_of(runs[kind], steps)

    return in_turns(KINDS, rounds, measure)


def _report(name: str, busy: int, times: dict[str, list[list[float]]]) -> None:
    count = sum(param.numel() for param in MODELS[name][0]().parameters())
    print(f"\n{name}, {count:,} parameters, beside {busy} busy processes")
    print("| | ms/step, median | spark_hvd is x times this | by round | ms/step, mean | spark_hvd is x times this |")
    print("|---|---|---|---|---|---|")
    medians, means = (
        {kind: [average(each) for each in rounds] for kind, rounds in times.items()}
        for average in (statistics.median, statistics.mean)
    )
    for kind in times:
        by_round = sorted(mine / other for mine, other in zip(medians["spark_hvd"], medians[kind], strict=True))
        cells = [
            f"{statistics.median(medians[kind]):.2f}",
            f"{statistics.median(medians['spark_hvd']) / statistics.median(medians[kind]):.2f}",
            f"{by_round[0]:.2f}-{by_round[-1]:.2f}",
            f"{statistics.median(means[kind]):.2f}",
            f"{statistics.median(means['spark_hvd']) / statistics.median(means[kind]):.2f}",
        ]
        print(f"| {' | '.join([kind, *cells])} |", flush=True)


def main() -> None:
    """Measure and print one table for each model and number of neighbours."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--busy", type=int, nargs="+", default=[0], help="numbers of busy processes to measure beside")
    given = parser.parse_args()
    for name in given.models:
        for busy in given.busy:
            with _beside(busy):
                times = run_local(_measure, (name, given.rounds, given.steps), num_proc=2, verbose=0)[0]
            _report(name, busy, times)


if __name__ == "__main__":
    main()
