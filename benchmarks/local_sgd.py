"""Training over a slow network: DDP and DistributedOptimizer beside LocalSGD and DiLoCo, speed and accuracy.

`sudo python -m benchmarks.local_sgd [--rate 1gbit] [--rounds 2] [--seeds 3] [--every 20] [--ways fragments]`

Two hosts are network namespaces of this machine, a rank each, whose cables carry the rate and no more. What is timed is
an MLP of 10 million parameters on batches of 32 of scikit-learn's digits; each round times every way, and what is
printed are medians over the rounds. "alone" exchanges nothing: the limit that no network takes away. CPU time is that
of rank 0's process, also what exchanges take of it between two steps; it counts where other programs run, too.

Accuracy is that of an MLP of three hidden layers after 20 epochs over the digits, with a rate that falls as a cosine,
on the 30 % that were not trained on, as a mean over seeds, each with a split and weights of its own; the same steps in
every way. DiLoCo's outer momentum is 0.5: there are 19 outer steps, too few for the paper's 0.9. Prints the tables of
docs/benchmarks.md, from which `python -m benchmarks.plots` draws.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.on_hosts import run_on_hosts

MINUTES = 4
NEEDS_ROOT = True
BATCH = 32
OVERLAP = 5
FRAGMENTS = 4
ALPHA = 0.5
WIDTHS = [64, *[1568] * 5, 10]
OUTER_MOMENTUM = 0.5
EPOCHS = 20


@dataclass(frozen=True)
class Way:
    """A way to train."""

    name: str
    every_step: bool
    """Whether ranks exchange something in each step."""
    make: Callable[[Any, Any], tuple[Any, Any, Any]]
    """From a model and its optimizer: what to call, the optimizer, and what to do in the end."""


def ways(given: argparse.Namespace) -> list[Way]:
    """Those compared whose names have `given.ways`, a regular expression, in them; "alone" and DDP always."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    import spark_hvd.torch as hvd

    def nothing() -> None:
        pass

    def local(kind: Callable[..., Any], **options: Any) -> Callable[[Any, Any], tuple[Any, Any, Any]]:
        def make(model: Any, optimizer: Any) -> tuple[Any, Any, Any]:
            wrapped = kind(model, optimizer, given.every, **options)
            return model, wrapped, wrapped.synchronize

        return make

    def diloco(model: Any, optimizer: Any, every: int, **options: Any) -> Any:
        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=OUTER_MOMENTUM, nesterov=True, fused=True)
        return hvd.DiLoCo(model, optimizer, every, outer_optimizer=outer, **options)

    int8, int4 = hvd.Int8Compressor(), hvd.Int4Compressor()
    streaming = {"compression": int4, "overlap": OVERLAP, "fragments": FRAGMENTS}
    every = [
        Way("alone", False, lambda model, optimizer: (model, optimizer, nothing)),
        Way("DDP", True, lambda model, optimizer: (DistributedDataParallel(model), optimizer, nothing)),
        Way("DistributedOptimizer", True, lambda model, own: (model, hvd.DistributedOptimizer(own), nothing)),
        Way("LocalSGD", False, local(hvd.LocalSGD)),
        Way("LocalSGD, int8, overlap", False, local(hvd.LocalSGD, compression=int8, overlap=OVERLAP)),
        Way("DiLoCo", False, local(diloco)),
        Way("DiLoCo, int8", False, local(diloco, compression=int8)),
        Way("DiLoCo, int8, overlap", False, local(diloco, compression=int8, overlap=OVERLAP)),
        Way("DiLoCo, top 10 %, overlap", False, local(diloco, compression=hvd.TopKCompressor(0.1), overlap=OVERLAP)),
        Way("LocalSGD, int4, overlap", False, local(hvd.LocalSGD, compression=int4, overlap=OVERLAP)),
        Way("LocalSGD, int4, overlap, fragments", False, local(hvd.LocalSGD, **streaming)),
        Way("DiLoCo, int4, overlap, fragments", False, local(diloco, **streaming)),
        Way("LocalSGD, int4, alpha, fragments", False, local(hvd.LocalSGD, alpha=ALPHA, **streaming)),
        Way("DiLoCo, int4, alpha, fragments", False, local(diloco, alpha=ALPHA, **streaming)),
    ]
    return [way for way in every if way.name in ("alone", "DDP") or re.search(given.ways, way.name)]


def digits(seed: int) -> tuple[Any, Any, Any, Any]:
    """Rows to train on and to test on, and their labels."""
    import torch
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    rows, labels = load_digits(return_X_y=True)
    parts = train_test_split(rows / 16.0, labels, test_size=0.3, random_state=seed, stratify=labels)
    tensors = [torch.as_tensor(part) for part in parts]
    return tensors[0].float(), tensors[1].float(), tensors[2], tensors[3]


def mlp(widths: list[int], seed: int) -> Any:
    """Layers with ReLUs between them."""
    import torch
    from torch import nn

    torch.manual_seed(seed)
    layers = [layer for one, other in itertools.pairwise(widths) for layer in (nn.Linear(one, other), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def batches(count: int, rank: int, seed: int) -> list[Any]:
    """Indices of each batch of an epoch: of this rank's half, shuffled, as many on each rank."""
    import torch

    mine = torch.arange(rank, count // 2 * 2, 2)
    order = mine[torch.randperm(len(mine), generator=torch.Generator().manual_seed(seed))]
    return list(order[: len(order) // BATCH * BATCH].split(BATCH))


def train(call: Any, optimizer: Any, rows: Any, labels: Any, picked: list[Any], scheduler: Any = None) -> None:
    """A step for each batch, of the optimizer and of the rate."""
    from torch.nn.functional import cross_entropy

    for indices in picked:
        optimizer.zero_grad()
        cross_entropy(call(rows[indices]), labels[indices]).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def speeds(given: argparse.Namespace) -> dict[str, tuple[float, ...]]:
    """Medians by way: samples a second over both ranks, and this rank's CPU ms a step, all and what exchanges take."""
    import torch

    import spark_hvd.torch as hvd

    rows, _, labels, _ = digits(0)
    picked = batches(len(rows), hvd.rank(), 0) * given.every
    model = mlp(WIDTHS, 0)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    found: dict[str, list[tuple[float, ...]]] = {}
    for _ in range(given.rounds):
        for way in ways(given):
            model = mlp(WIDTHS, 0)
            model.load_state_dict(start)
            plain = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
            marks: list[float] = []
            # LocalSGD and DiLoCo work in such hooks, between the one that is registered before and the one after.
            plain.register_step_post_hook(lambda *_, marks=marks: marks.append(-time.process_time()))
            call, optimizer, finish = way.make(model, plain)
            plain.register_step_post_hook(lambda *_, marks=marks: marks.append(time.process_time()))
            # The clock starts halfway between two exchanges, and stops as many steps after one, two rounds later.
            before, steps = (2, 10) if way.every_step else (given.every // 2, 2 * given.every)
            train(call, optimizer, rows, labels, picked[:before])
            hvd.barrier()
            marks.clear()
            begun, busy = time.perf_counter(), time.process_time()
            train(call, optimizer, rows, labels, picked[:steps])
            hvd.barrier()
            seconds, busy = time.perf_counter() - begun, time.process_time() - busy
            finish()
            found.setdefault(way.name, []).append(
                (hvd.size() * BATCH * steps / seconds, 1000 * busy / steps, 1000 * sum(marks) / steps)
            )
    return {name: tuple(map(statistics.median, zip(*each, strict=True))) for name, each in found.items()}


def accuracies(given: argparse.Namespace) -> dict[str, list[float]]:
    """Percent of the digits that are told right, for each seed, by way."""
    import torch

    import spark_hvd.torch as hvd

    found: dict[str, list[float]] = {}
    for seed in range(given.seeds):
        rows, tests, labels, expected = digits(seed)
        for way in ways(given)[1:]:
            model = mlp([64, 128, 128, 128, 10], seed)
            call, optimizer, finish = way.make(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
            epochs = [batches(len(rows), hvd.rank(), 1000 * seed + epoch) for epoch in range(EPOCHS)]
            rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, sum(map(len, epochs)))
            for picked in epochs:
                train(call, optimizer, rows, labels, picked, rate)
            finish()
            with torch.no_grad():
                right = (model(tests).argmax(1) == expected).double().mean()
            found.setdefault(way.name, []).append(100 * float(right))
    return found


def main() -> None:
    """Measure and print; or, as a rank, measure and write to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="1gbit", help="of every cable, as tc writes it, or none")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--every", type=int, default=20, help="steps from one exchange to the next")
    parser.add_argument(
        "--ways", default="", help="only those with this regular expression in their names, such as int4|top"
    )
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        import spark_hvd.torch as hvd

        hvd.init()
        found = {"speeds": speeds(given), "accuracies": accuracies(given)}
        Path(given.rank).write_text(json.dumps(found))
        hvd.shutdown()
        return
    arguments = [f"--{option}={getattr(given, option)}" for option in ("rounds", "seeds", "every", "ways")]
    found = run_on_hosts("benchmarks.local_sgd", arguments, 2, given.rate)
    if given.rounds:
        print("| way | samples/s | of DDP's | of alone | CPU ms a step | of which exchanges | the rest |")
        print("|--|--|--|--|--|--|--|")
    for name, (speed, busy, exchanges) in found["speeds"].items():
        parts = [speed / found["speeds"][other][0] for other in ("DDP", "alone")]
        print(
            f"| {name} | {speed:.0f} | {parts[0]:.2f} | {parts[1]:.2f} "
            f"| {busy:.1f} | {exchanges:.1f} | {1 - exchanges / busy:.3f} |"
        )
    if given.seeds:
        print("\n| way | accuracy, mean | points from DDP | lowest | highest |\n|--|--|--|--|--|")
    for name, right in found["accuracies"].items():
        mean = statistics.mean(right)
        points = mean - statistics.mean(found["accuracies"]["DDP"])
        print(f"| {name} | {mean:.2f} | {points:+.2f} | {min(right):.2f} | {max(right):.2f} |")


if __name__ == "__main__":
    main()
