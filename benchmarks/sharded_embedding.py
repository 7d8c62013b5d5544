"""Time of a step on an embedding table, two ranks: ShardedEmbedding beside nn.Embedding(sparse=True).

`python -m benchmarks.sharded_embedding [--rounds 7] [--steps 20] [--rows 1000000] [--dim 32] [--batch 4096]`

Both live in the same processes and take turns. DistributedOptimizer gathers the sparse gradients of nn.Embedding.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
from torch import nn

import spark_hvd.torch as hvd
from benchmarks.common import in_turns, milliseconds_of
from spark_hvd import run_local

MINUTES = 1.5
WARM_UP = 5
BATCHES = 8
KINDS = ("nn.Embedding, sparse allgather", "ShardedEmbedding", "ShardedEmbedding, ids ahead")
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.01),
    "SparseAdam": lambda params: torch.optim.SparseAdam(params, lr=0.01),
    "RowWiseAdagrad": lambda params: hvd.RowWiseAdagrad(params, lr=0.01),
}
Step = Callable[[], None]


def _make_step(kind: str, optimizer_name: str, given: argparse.Namespace) -> tuple[Step, int]:
    """A step, and the bytes of the weight here."""
    generator = torch.Generator().manual_seed(hvd.rank())
    batches = [torch.randint(given.rows, (given.batch,), generator=generator) for _ in range(BATCHES)]
    sharded = kind.startswith("Sharded")
    table: nn.Module = (
        hvd.ShardedEmbedding(given.rows, given.dim) if sharded else nn.Embedding(given.rows, given.dim, sparse=True)
    )
    layer = nn.Linear(given.dim, 1)
    hvd.broadcast_parameters([*table.parameters(), *layer.parameters()])
    optimizers = [
        hvd.DistributedOptimizer(OPTIMIZERS[optimizer_name](list(table.parameters()))),
        hvd.DistributedOptimizer(torch.optim.SGD(layer.parameters(), lr=0.01)),
    ]
    ahead: list[hvd.LookUp] = []
    number = 0

    def step() -> None:
        nonlocal number
        ids, following = batches[number % BATCHES], batches[(number + 1) % BATCHES]
        number += 1
        if "ahead" in kind:
            assert isinstance(table, hvd.ShardedEmbedding)
            [rows] = (ahead.pop() if ahead else hvd.look_up_async([table], [ids])).wait()
            ahead.append(hvd.look_up_async([table], [following]))
        else:
            rows = table(ids)
        for optimizer in optimizers:
            optimizer.zero_grad()
        layer(rows).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()

    return step, sum(param.nbytes for param in table.parameters())


def _measure(name: str, given: argparse.Namespace) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Median milliseconds of a step by kind and round, and the bytes of each kind's weight here."""
    torch.set_num_threads(1)
    made = {kind: _make_step(kind, name, given) for kind in KINDS}
    for step, _ in made.values():
        for _ in range(WARM_UP):
            step()

    def measure(kind: str) -> float:
        hvd.barrier()
        return statistics.median(milliseconds_of(made[kind][0], given.steps))

    return in_turns(KINDS, given.rounds, measure), {kind: size for kind, (_, size) in made.items()}


def _report(name: str, times: dict[str, list[float]], sizes: dict[str, int]) -> None:
    if name == next(iter(OPTIMIZERS)):
        print("| optimizer | table | ms a step | x as fast | by round | of the table here |\n|---|---|---|---|---|---|")
    base = times[KINDS[0]]
    for kind, mine in times.items():
        ratios = sorted(other / own for other, own in zip(base, mine, strict=True))
        cells = [
            name,
            kind,
            f"{statistics.median(mine):.2f}",
            f"{statistics.median(ratios):.2f}",
            f"{ratios[0]:.2f}-{ratios[-1]:.2f}",
            f"{sizes[kind] / sizes[KINDS[0]]:.1%}",
        ]
        print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--batch", type=int, default=4096, help="ids of each rank")
    given = parser.parse_args()
    for name in OPTIMIZERS:
        _report(name, *run_local(_measure, (name, given), num_proc=2, verbose=0)[0])


if __name__ == "__main__":
    main()
