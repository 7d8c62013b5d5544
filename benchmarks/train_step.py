"""Time of a training step on two ranks: DistributedOptimizer beside DDP, in the same processes, in alternating rounds.

`python -m benchmarks.train_step [--rounds 9] [--steps 20] [--models cnn mlp many]`
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from spark_hvd.context import init, shutdown
from spark_hvd.optimizer import DistributedOptimizer

BATCH = 32
WARM_UP = 5
KINDS = ("DDP", "DDP, bucket views", "spark_hvd", "spark_hvd over Gloo")
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


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "cnn": (_cnn, (BATCH, 1, 28, 28), 10),
    "mlp": (_mlp, (BATCH, 784), 10),
    "many": (Chain, (BATCH, 1000), 1000),
}


def _make_step(name: str, kind: str, rank: int) -> Step:
    build, shape, classes = MODELS[name]
    torch.manual_seed(0)
    model = build()
    torch.manual_seed(rank)
    rows, labels = torch.randn(shape), torch.randint(0, classes, (BATCH,))
    if kind.startswith("DDP"):
        model = DistributedDataParallel(model, gradient_as_bucket_view="views" in kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    if not kind.startswith("DDP"):
        optimizer = DistributedOptimizer(  # type: ignore[assignment]
            optimizer, model.named_parameters(), shared_memory="Gloo" not in kind
        )
    criterion = nn.CrossEntropyLoss()

    def step() -> None:
        optimizer.zero_grad()
        criterion(model(rows), labels).backward()
        optimizer.step()

    return step


def _measure(name: str, rank: int, rounds: int, steps: int) -> dict[str, list[float]]:
    """Median milliseconds of a step, by kind and round."""
    runs = {kind: _make_step(name, kind, rank) for kind in KINDS}
    for step in runs.values():
        for _ in range(WARM_UP):
            step()
    medians: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(rounds):
        for kind in KINDS if number % 2 == 0 else KINDS[::-1]:
            dist.barrier()
            times = []
            for _ in range(steps):
                start = time.perf_counter()
                runs[kind]()
                times.append(time.perf_counter() - start)
            medians[kind].append(1e3 * statistics.median(times))
    return medians


def _rank(rank: int, meeting: str, names: Sequence[str], rounds: int, steps: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    init()
    for name in names:
        medians = _measure(name, rank, rounds, steps)
        if rank == 0:
            _report(name, medians)
    shutdown()
    dist.destroy_process_group()


def _report(name: str, medians: dict[str, list[float]]) -> None:
    ours = medians["spark_hvd"]
    count = sum(param.numel() for param in MODELS[name][0]().parameters())
    print(f"\n{name}, {count:,} parameters\n| | ms/step | spark_hvd is x times this | by round |\n|---|---|---|---|")
    for kind, theirs in medians.items():
        by_round = [mine / other for mine, other in zip(ours, theirs, strict=True)]
        ratio = statistics.median(ours) / statistics.median(theirs)
        shown = " ".join(f"{each:.2f}" for each in by_round)
        print(f"| {kind} | {statistics.median(theirs):.2f} | {ratio:.2f} | {shown} |", flush=True)


def main() -> None:
    """Measure and print one table a model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        meeting = str(Path(folder) / "meeting")
        spawn(_rank, args=(meeting, arguments.models, arguments.rounds, arguments.steps), nprocs=2)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
