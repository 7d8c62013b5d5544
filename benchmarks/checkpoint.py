"""What a checkpoint costs training: steps with none, with a save that waits, and with one in the background.

`python -m benchmarks.checkpoint [--np 2] [--megabytes 80] [--rounds 7] [--steps 16] [--where FOLDER]`

Cycles of some steps take turns, in alternating order; within a cycle there is one save, or none. Held is the time that
rank 0 spends in `save`. What is copied in the background goes to memory that the first save has made.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time

import spark_hvd

MINUTES = 1.5
KINDS = ("none", "wait=True", "wait=False")
BATCH, LAYERS = 32, 6


def measure(megabytes: float, rounds: int, steps: int, where: str) -> dict[str, dict[str, list[float]]]:
    """Milliseconds of each cycle, of its save, of its steps, and of those during which a save was written."""
    import torch

    import spark_hvd.torch as hvd

    width = round((megabytes * 1e6 / (3 * 4 * LAYERS)) ** 0.5)  # weights, and two moments of Adam
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(LAYERS)))
    inner = torch.optim.Adam(model.parameters(), lr=1e-4)
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters())
    rows = torch.randn(BATCH, width)
    found: dict[str, dict[str, list[float]]] = {
        kind: {name: [] for name in ("cycle", "save", "step", "writing")} for kind in KINDS
    }
    number = 0
    for turn in range(-2, rounds):
        for kind in KINDS if turn % 2 == 0 else KINDS[::-1]:
            times = found[kind] if turn >= 0 else {name: [] for name in found[kind]}
            handle = None
            number += 1
            hvd.barrier()
            began = time.perf_counter()
            for step in range(steps):
                start = time.perf_counter()
                optimizer.zero_grad()
                model(rows).square().mean().backward()
                optimizer.step()
                taken = 1e3 * (time.perf_counter() - start)
                times["step" if handle is None or handle.done() else "writing"].append(taken)
                if step == 2 and kind != "none":
                    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                    start = time.perf_counter()
                    handle = hvd.checkpoint.save(f"{where}/{kind}", state, number, wait=kind == "wait=True")
                    times["save"].append(1e3 * (time.perf_counter() - start))
            times["cycle"].append(1e3 * (time.perf_counter() - began))
            if handle is not None:
                handle.wait()
            os.sync()  # what this one leaves to the disk is not the next one's
    return found


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--np", type=int, default=2, help="ranks")
    parser.add_argument("--megabytes", type=float, default=80.0)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=16, help="in a cycle")
    parser.add_argument("--where", help="a folder on the disk to measure; else a temporary one")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.where) as folder:
        job = (given.megabytes, given.rounds, given.steps, folder)
        found = spark_hvd.run_local(measure, job, num_proc=given.np, verbose=0)[0]
    waits = statistics.median(found["wait=True"]["save"])
    bare = found["none"]["cycle"]
    print("| save | held, ms | range | of one that waits | a cycle takes longer, ms | steps meanwhile, ms |")
    print("|---|---|---|---|---|---|")
    for kind in KINDS:
        mine = found[kind]
        longer = statistics.median(one - other for one, other in zip(mine["cycle"], bare, strict=True))
        held = mine["save"] or [0.0]
        beside = statistics.median(mine["writing"] if kind == "wait=False" else mine["step"])
        print(
            f"| {kind} | {statistics.median(held):.1f} | {min(held):.1f}-{max(held):.1f} | "
            f"{100 * statistics.median(held) / waits:.1f} % | {longer:.0f} | {beside:.1f} |"
        )


if __name__ == "__main__":
    main()
