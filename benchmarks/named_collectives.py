"""Named collectives on two local ranks: many small tensors at once beside raw torch.distributed, and what idling costs.

`python -m benchmarks.named_collectives [--tensors 500] [--elements 1000] [--rounds 30] [--ranks 2] [--idle 10]`

Many tensors: `allreduce_async_` by name for each, then `synchronize` for each; beside it one `dist.all_reduce` of as
many bytes, the same with packing and unpacking by hand, and one `dist.all_reduce` a tensor. All in the same processes,
in turns. Idling: user and system seconds of a rank that is in a world and does nothing.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import spark_hvd.torch as hvd
from benchmarks.common import in_turns, seconds_a_call
from spark_hvd import run_local

MINUTES = 0.5
KINDS = ("one flat dist.all_reduce", "cat, dist.all_reduce, split", "dist.all_reduce each", "hvd async by name")


def _measure(tensors: int, elements: int, rounds: int, idle: float) -> dict[str, float]:
    """Median seconds for all tensors by each kind, the median of the rounds' ratios, and CPU seconds of idling."""
    parts = [torch.zeros(elements) for _ in range(tensors)]
    names = [f"tensor.{number}" for number in range(tensors)]
    flat = torch.zeros(tensors * elements)

    def by_hand() -> None:
        packed = torch.cat(parts)
        dist.all_reduce(packed)
        torch.split_with_sizes_copy(packed, [elements] * tensors, out=parts)

    def by_name() -> None:
        handles = [hvd.allreduce_async_(part, name=name, op=hvd.Sum) for part, name in zip(parts, names, strict=True)]
        for handle in handles:
            hvd.synchronize(handle)

    def each() -> None:
        for part in parts:
            dist.all_reduce(part)

    calls: dict[str, Callable[[], object]] = dict(
        zip(KINDS, (lambda: dist.all_reduce(flat), by_hand, each, by_name), strict=True)
    )
    times = in_turns(KINDS, rounds, lambda kind: seconds_a_call(calls[kind], 1, hvd.barrier)[0], warm_up=3)
    result = {kind: statistics.median(times[kind]) for kind in KINDS}
    pairs = zip(times[KINDS[3]], times[KINDS[0]], strict=True)
    result["ratio to one flat"] = statistics.median(ours / raw for ours, raw in pairs)
    hvd.barrier()
    start = time.process_time()
    time.sleep(idle)
    result["idle CPU seconds"] = time.process_time() - start
    return result


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=500)
    parser.add_argument("--elements", type=int, default=1000, help="float32 each")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--idle", type=float, default=10.0, help="seconds")
    given = parser.parse_args()
    arguments = (given.tensors, given.elements, given.rounds, given.idle)
    result = run_local(_measure, args=arguments, num_proc=given.ranks)[0]
    print(f"| {given.tensors} tensors of {given.elements} float32 | ms | to one flat |\n|---|---:|---:|")
    for kind in KINDS:
        print(f"| {kind} | {result[kind] * 1e3:.2f} | {result[kind] / result[KINDS[0]]:.2f} |")
    print(f"\nMedian of the rounds' own ratios: {result['ratio to one flat']:.2f}.")
    print(f"Idle for {given.idle:g} s: {result['idle CPU seconds']:.4f} s of user and system time.")


if __name__ == "__main__":
    main()
