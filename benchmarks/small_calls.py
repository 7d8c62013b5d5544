"""Small synchronous collectives on local ranks, each beside torch.distributed's on Gloo, in turns in one process.

`python -m benchmarks.small_calls [--elements 1] [--rounds 15] [--calls 100] [--ranks 2]`

All calls are without a name, but for one line. Each is called often enough before that ranks know it.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import spark_hvd.torch as hvd
from benchmarks.common import in_turns, seconds_a_call
from spark_hvd import run_local

MINUTES = 1
WARM_UP = 180


def _pairs(elements: int) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """By what is called: ours, and torch.distributed's."""
    tensor = torch.ones(elements)
    parts = [torch.zeros(elements) for _ in range(hvd.size())]
    value = {"loss": 0.5, "rank": hvd.rank()}
    values: list[Any] = [None] * hvd.size()
    summed: Callable[[], object] = lambda: dist.all_reduce(tensor)  # noqa: E731
    return {
        "allreduce by name": (lambda: hvd.allreduce(tensor, name="loss", op=hvd.Sum), summed),
        "allreduce": (lambda: hvd.allreduce(tensor, op=hvd.Sum), summed),
        "allreduce Average": (lambda: hvd.allreduce(tensor), summed),
        "allreduce Max": (
            lambda: hvd.allreduce(tensor, op=hvd.Max),
            lambda: dist.all_reduce(tensor, dist.ReduceOp.MAX),
        ),
        "allgather": (lambda: hvd.allgather(tensor), lambda: dist.all_gather(parts, tensor)),
        "broadcast": (lambda: hvd.broadcast(tensor, 0), lambda: dist.broadcast(tensor, 0)),
        "barrier": (hvd.barrier, dist.barrier),
        "broadcast_object": (lambda: hvd.broadcast_object(value), lambda: dist.broadcast_object_list([value], 0)),
        "allgather_object": (lambda: hvd.allgather_object(value), lambda: dist.all_gather_object(values, value)),
    }


def _measure(elements: int, rounds: int, calls: int) -> dict[str, tuple[float, float, float]]:
    """By what is called: median seconds of ours and of torch.distributed's, and the median of the rounds' ratios."""

    def measured(ours: Callable[[], object], theirs: Callable[[], object]) -> tuple[float, float, float]:
        seconds_a_call(ours, WARM_UP, dist.barrier)
        seconds_a_call(theirs, 10, dist.barrier)
        both = {"theirs": theirs, "ours": ours}
        times = in_turns([*both], rounds, lambda who: seconds_a_call(both[who], calls, dist.barrier)[0])
        ratio = statistics.median(mine / other for mine, other in zip(times["ours"], times["theirs"], strict=True))
        return statistics.median(times["ours"]), statistics.median(times["theirs"]), ratio

    return {kind: measured(*pair) for kind, pair in _pairs(elements).items()}


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=1, help="float32 of a tensor")
    parser.add_argument("--rounds", type=int, default=15, help="turns, of which the median counts")
    parser.add_argument("--calls", type=int, default=100, help="calls in a turn")
    parser.add_argument("--ranks", type=int, default=2)
    given = parser.parse_args()
    rows = run_local(_measure, args=(given.elements, given.rounds, given.calls), num_proc=given.ranks)[0]
    print("| call | hvd us | torch.distributed us | ratio |\n|---|---:|---:|---:|")
    for kind, (ours, theirs, ratio) in rows.items():
        print(f"| {kind} | {ours * 1e6:,.0f} | {theirs * 1e6:,.0f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
