"""How well the cost line of a run on two ranks foretells a run on four: predicted and measured, side by side.

`python -m benchmarks.cost [--rounds 2] [--steps 80] [--megabytes 0.4 4 16]`

A step sleeps in place of computing, a fixed time divided by the ranks, so that four ranks are as good as two on a
machine of two cores; then it reduces its gradients with DistributedOptimizer, which does take the cores. Either all
ranks together keep their batch (as many steps), or each rank keeps its own (half the steps, of the same length).
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from benchmarks.on_hosts import run_on_hosts
from spark_hvd import run_local
from spark_hvd.runner.watch.cost import Cost
from spark_hvd.runner.watch.view import RunView
from spark_hvd.world.vitals import Vitals

MINUTES = 2
SLEEP = 0.16
"""Seconds of sleep of all ranks together, a step."""


def train(steps: int, seconds: float, megabytes: float) -> None:
    """Steps of one rank.

    Args:
        steps: How many.
        seconds: Of sleep in each.
        megabytes: Of gradients.
    """
    import time

    import torch

    import spark_hvd.torch as hvd

    model = torch.nn.Linear(100, int(megabytes * 1e6 / 4 / 101))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())
    row = torch.ones(1, 100)
    for _ in hvd.progress(range(steps)):
        time.sleep(seconds)
        optimizer.zero_grad()
        model(row).sum().backward()
        optimizer.step()


def measured(ranks: int, steps: int, seconds: float, megabytes: float, rate: str = "") -> Cost:
    """The cost of a run, on this machine or on hosts whose cables carry a rate."""
    if rate:
        return measured_on_hosts(ranks, steps, seconds, megabytes, rate)
    result = run_local(train, (steps, seconds, megabytes), num_proc=ranks, verbose=0)
    assert result.summary is not None
    assert result.summary.cost is not None
    return result.summary.cost


def measured_on_hosts(ranks: int, steps: int, seconds: float, megabytes: float, rate: str) -> Cost:
    """The same with a rank on each of so many network namespaces, from what the ranks would have told a driver."""
    arguments = [str(steps), str(seconds), str(megabytes)]
    records = run_on_hosts("benchmarks.cost", arguments, ranks, rate)
    view = RunView("train", ranks, 0.0)
    for moment in range(2):
        for rank in range(ranks):
            record = Vitals.from_message(records[rank][moment])
            view.take(record, record.clock - records[0][0]["clock"])
    cost = view.summary(records[0][1]["clock"] - records[0][0]["clock"]).cost
    assert cost is not None
    return cost


def as_rank(path: str, steps: str, seconds: str, megabytes: str) -> None:
    """Train as a rank of a world given by torchrun's variables; write what all tell after some steps and at the end."""
    import spark_hvd.torch as hvd
    from spark_hvd.context.observe import observe

    hvd.init()
    told = []
    for count in (5, int(steps)):
        train(count, float(seconds), float(megabytes))
        hvd.barrier()
        vitals = observe()
        assert vitals is not None
        told.append(vitals.to_message())
    Path(path).write_text(json.dumps(hvd.allgather_object(told)))
    hvd.shutdown()


def stepping(cost: Cost) -> float:
    """Seconds of a run that its steps took."""
    return (cost.divided or 0.0) + (cost.communication or 0.0)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=80, help="with two ranks")
    parser.add_argument("--megabytes", type=float, nargs="+", default=[0.4, 4.0, 16.0], help="of gradients")
    parser.add_argument("--rate", default="", help="of the cable of each rank's host, as tc writes it; needs root")
    parser.add_argument("--rank", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        as_rank(*given.rank)
        return
    measured(4, 2, 0.0, 0.1)  # what only the first run does
    print(
        "| gradients, MB | batch kept | 2 ranks, s | waiting | 4 predicted, s | 4 measured, s | off | steps alone off |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for megabytes in given.megabytes:
        for same_steps in (True, False):
            rounds = []
            for _ in range(given.rounds):
                two = measured(2, given.steps, SLEEP / 2, megabytes, given.rate)
                steps, sleep = (given.steps, SLEEP / 4) if same_steps else (given.steps // 2, SLEEP / 2)
                four = measured(4, steps, sleep, megabytes, given.rate)
                predicted = two.seconds_with(4, same_steps=same_steps)
                start = two.seconds - stepping(two)
                waited = (two.communication or 0.0) / stepping(two)
                off = predicted / four.seconds - 1
                rounds.append(
                    (two.seconds, waited, predicted, four.seconds, off, (predicted - start) / stepping(four) - 1)
                )
            before, waited, predicted, after, off, alone = (
                statistics.median(each) for each in zip(*rounds, strict=True)
            )
            kept = "of all ranks" if same_steps else "of each rank"
            times = f"{before:.2f} | {100 * waited:.0f} % | {predicted:.2f} | {after:.2f}"
            print(f"| {megabytes:g} | {kept} | {times} | {100 * off:+.0f} % | {100 * alone:+.0f} % |", flush=True)


if __name__ == "__main__":
    main()
