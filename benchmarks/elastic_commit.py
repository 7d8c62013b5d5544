"""What a commit costs: a step with none, with a deep copy of the state dicts as Horovod makes, and with TorchState's.

`python -m benchmarks.elastic_commit [--ranks 1] [--rounds 7] [--every 10] [--commits 4] [--optimizers momentum adam]`

A commit is made every few steps; the three kinds take turns in one process, in rounds, each with a model of its own.
The lowest time of any turn is what a machine that others use as well shows of a quiet one.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn

import spark_hvd.torch as hvd

MINUTES = 1.5
BATCH = 32
KINDS = ("no commit", "deep copy", "TorchState")
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9),
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=1e-4),
}


def _model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(),
        nn.Linear(2048, 10),
    )  # fmt: skip


class _Copies:
    """Keeps deep copies of state dicts."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._parts: tuple[Any, ...] = (model, optimizer)
        self._kept: list[object] = []

    def commit(self) -> None:
        for place, part in enumerate(self._parts):
            self._kept[place : place + 1] = [copy.deepcopy(part.state_dict())]


class _Nothing:
    def commit(self) -> None:
        pass


class _Training:
    """A model in training, and the seconds that its cycles of steps and one commit took."""

    def __init__(self, kind: str, optimizer: str, rank: int, every: int) -> None:
        torch.manual_seed(0)
        self._model = _model()
        self._optimizer = hvd.DistributedOptimizer(OPTIMIZERS[optimizer](self._model), self._model.named_parameters())
        torch.manual_seed(rank)
        self._rows, self._labels = torch.randn(BATCH, 784), torch.randint(0, 10, (BATCH,))
        self._every = every
        self._state: hvd.elastic.TorchState | _Copies | _Nothing = _Nothing()
        if kind == "deep copy":
            self._state = _Copies(self._model, self._optimizer)
        elif kind == "TorchState":
            self._state = hvd.elastic.TorchState(self._model, self._optimizer, step=0)
        self.commits: list[float] = []

    def cycle(self) -> float:
        """Make some steps, with a commit before the last of them; seconds a step."""
        start = time.perf_counter()
        for left in reversed(range(self._every)):
            self._optimizer.zero_grad()
            nn.functional.cross_entropy(self._model(self._rows), self._labels).backward()
            self._optimizer.step()
            if left == 1 or self._every == 1:
                begun = time.perf_counter()
                self._state.commit()
                self.commits.append(time.perf_counter() - begun)
        return (time.perf_counter() - start) / self._every


def _measure(optimizer: str, rank: int, arguments: argparse.Namespace) -> None:
    trainings = {kind: _Training(kind, optimizer, rank, arguments.every) for kind in KINDS}
    for training in trainings.values():
        for _ in range(3):  # the second and third commit allocate
            training.cycle()
        training.commits.clear()
    rounds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    lowest = dict.fromkeys(KINDS, math.inf)
    for number in range(arguments.rounds):
        times: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for turn in range(arguments.commits):
            for kind in KINDS if (number + turn) % 2 == 0 else KINDS[::-1]:
                hvd.barrier()
                times[kind].append(1e3 * trainings[kind].cycle())
        for kind in KINDS:
            rounds[kind].append(statistics.median(times[kind]))
            lowest[kind] = min(lowest[kind], *times[kind])
    if rank == 0:
        _report(optimizer, trainings, rounds, lowest)


def _report(
    optimizer: str, trainings: dict[str, _Training], rounds: dict[str, list[float]], lowest: dict[str, float]
) -> None:
    count = sum(param.numel() for param in _model().parameters())
    print(f"\n{optimizer}, {count:,} parameters, {hvd.size()} rank(s)")
    print("| | ms/step | more than without | by round | lowest ms/step | more | in commit(), ms |")
    print("|---|---|---|---|---|---|---|")
    for kind, mine in rounds.items():
        by_round = [100 * (each / base - 1) for each, base in zip(mine, rounds["no commit"], strict=True)]
        shown = " ".join(f"{each:.1f}" for each in by_round)
        inside = 1e3 * statistics.median(trainings[kind].commits)
        more = f"{statistics.median(by_round):.1f} % | {shown}"
        least = f"{lowest[kind]:.1f} | {100 * (lowest[kind] / lowest['no commit'] - 1):.1f} %"
        print(f"| {kind} | {statistics.median(mine):.1f} | {more} | {least} | {inside:.1f} |", flush=True)


def _rank(rank: int, meeting: str, arguments: argparse.Namespace) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=arguments.ranks)
    hvd.init()
    for optimizer in arguments.optimizers:
        _measure(optimizer, rank, arguments)
    hvd.shutdown()
    dist.destroy_process_group()


def main() -> None:
    """Measure and print one table an optimizer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--commits", type=int, default=4)
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        meeting = str(Path(folder) / "meeting")
        spawn(_rank, args=(meeting, arguments), nprocs=arguments.ranks)


if __name__ == "__main__":
    main()
