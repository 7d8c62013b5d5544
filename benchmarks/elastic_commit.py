"""What a commit costs: a step with none, with a deep copy of the state dicts as Horovod makes, and with TorchState's.

`python -m benchmarks.elastic_commit [--ranks 1] [--rounds 7] [--every 10] [--commits 4] [--optimizers momentum adam]`

A commit is made every few steps; the three kinds take turns in one process, in rounds, each with a model of its own.
The lowest time of any turn is what a machine that others use as well shows of a quiet one.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import spark_hvd.torch as hvd
from benchmarks.train_step import MODELS
from spark_hvd import run_local

MINUTES = 1.5
BATCH = 32
KINDS = ("no commit", "deep copy", "TorchState")
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9),
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=1e-4),
}


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
        self._model = MODELS["mlp"][0]()
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


def _measure(
    optimizer: str, arguments: argparse.Namespace
) -> tuple[dict[str, list[list[float]]], dict[str, list[float]]]:
    """By kind: milliseconds a step in each turn, by round, and milliseconds in each commit."""
    torch.set_num_threads(1)
    trainings = {kind: _Training(kind, optimizer, hvd.rank(), arguments.every) for kind in KINDS}
    for training in trainings.values():
        for _ in range(3):  # the second and third commit allocate
            training.cycle()
        training.commits.clear()
    rounds: dict[str, list[list[float]]] = {kind: [] for kind in KINDS}
    for number in range(arguments.rounds):
        times: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for turn in range(arguments.commits):
            for kind in KINDS if (number + turn) % 2 == 0 else KINDS[::-1]:
                hvd.barrier()
                times[kind].append(1e3 * trainings[kind].cycle())
        for kind in KINDS:
            rounds[kind].append(times[kind])
    return rounds, {kind: [1e3 * each for each in training.commits] for kind, training in trainings.items()}


def _report(optimizer: str, ranks: int, rounds: dict[str, list[list[float]]], commits: dict[str, list[float]]) -> None:
    count = sum(param.numel() for param in MODELS["mlp"][0]().parameters())
    print(f"\n{optimizer}, {count:,} parameters, {ranks} rank(s)")
    print("| | ms/step | more than without | by round | lowest ms/step | more | in commit(), ms |")
    print("|---|---|---|---|---|---|---|")
    medians = {kind: [statistics.median(times) for times in mine] for kind, mine in rounds.items()}
    lowest = {kind: min(map(min, mine)) for kind, mine in rounds.items()}
    for kind, mine in medians.items():
        by_round = [100 * (each / base - 1) for each, base in zip(mine, medians["no commit"], strict=True)]
        shown = " ".join(f"{each:.1f}" for each in by_round)
        more = f"{statistics.median(by_round):.1f} % | {shown}"
        least = f"{lowest[kind]:.1f} | {100 * (lowest[kind] / lowest['no commit'] - 1):.1f} %"
        inside = statistics.median(commits[kind])
        print(f"| {kind} | {statistics.median(mine):.1f} | {more} | {least} | {inside:.1f} |", flush=True)


def main() -> None:
    """Measure and print one table an optimizer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--commits", type=int, default=4)
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    arguments = parser.parse_args()
    for optimizer in arguments.optimizers:
        found = run_local(_measure, (optimizer, arguments), num_proc=arguments.ranks, verbose=0)[0]
        _report(optimizer, arguments.ranks, *found)


if __name__ == "__main__":
    main()
