"""Weak scaling at two ranks, measured: a compute-bound CNN, one thread a rank, beside the machine's own ceiling.

`python -m benchmarks.scaling [--rounds 11] [--steps 8]`

Kinds of rounds take turns in the same two processes, with the same model and batch: rank 0 alone with a plain
optimizer; both ranks at once with plain optimizers, which share only the machine; the same with a bare barrier in each
step; both with DistributedOptimizer. Efficiency is the first by the others. The second is what memory, caches and clock
allow without any communication; the third what is left when the faster rank waits for the slower in each step, as in
all synchronous training. The rest is what DistributedOptimizer itself costs.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import spark_hvd.torch as hvd
from benchmarks.common import in_turns, milliseconds_of
from spark_hvd import run_local

MINUTES = 1.5
ALONE, TOGETHER = "one rank alone", "two ranks, no communication"
IN_STEP = "two ranks, a bare barrier each step"
OURS, OVER_GLOO = "two ranks, DistributedOptimizer", "two ranks, DistributedOptimizer over Gloo"
KINDS = (ALONE, TOGETHER, IN_STEP, OURS, OVER_GLOO)
WARM_UP = 3
BATCH, SIDE = 16, 48
Step = Callable[[], None]


def _block(inside: int, outside: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU(), nn.MaxPool2d(2))


def _cnn() -> nn.Module:
    return nn.Sequential(
        _block(3, 64), _block(64, 128), _block(128, 256), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10)
    )


def _make_step(kind: str) -> Step:
    torch.manual_seed(0)
    model = _cnn()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    if kind in (OURS, OVER_GLOO):
        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), shared_memory=kind == OURS
        )
    rows, labels = torch.randn(BATCH, 3, SIDE, SIDE), torch.randint(0, 10, (BATCH,))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(rows), labels).backward()
        if kind == IN_STEP:
            dist.barrier()
        optimizer.step()

    return step


def _measure(rounds: int, steps: int) -> dict[str, list[float]]:
    """Median milliseconds of a step on this rank, by kind and round."""
    torch.set_num_threads(1)
    kinds = {kind: _make_step(kind) for kind in KINDS}
    for step in kinds.values():
        for _ in range(WARM_UP):
            step()

    def measure(kind: str) -> float:
        hvd.barrier()
        idle = kind == ALONE and hvd.rank() != 0
        return 0.0 if idle else statistics.median(milliseconds_of(kinds[kind], steps))

    return in_turns(KINDS, rounds, measure)


def table(ranks: Sequence[dict[str, list[float]]]) -> str:
    """Markdown, from what each rank measured; of kinds that both ranks ran, the slower counts in each round."""
    alone = ranks[0][ALONE]
    lines = ["| | ms a step | efficiency | by round |", "|---|---:|---:|---|"]
    for kind in KINDS:
        times = alone if kind == ALONE else [max(pair) for pair in zip(*(rank[kind] for rank in ranks), strict=True)]
        parts = [one / many for one, many in zip(alone, times, strict=True)]
        lines.append(
            f"| {kind} | {statistics.median(times):.1f} | {statistics.median(parts):.1%} "
            f"| {min(parts):.1%} to {max(parts):.1%} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11, help="turns of each kind")
    parser.add_argument("--steps", type=int, default=8, help="steps a turn, of which the median counts")
    given = parser.parse_args()
    print(table(run_local(_measure, args=(given.rounds, given.steps), num_proc=2, env={"OMP_NUM_THREADS": "1"})))


if __name__ == "__main__":
    main()
