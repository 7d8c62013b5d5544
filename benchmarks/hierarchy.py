"""Hierarchical all-reduce beside flat rings over Gloo, between hosts with several ranks each and shaped cables.

`sudo python -m benchmarks.hierarchy [--rate 1gbit] [--layouts 2x2 2x4] [--sizes 1048576 ...] [--png FILE]`

Hosts are network namespaces whose cables carry the rate and no more (`tc tbf`). The same bytes are summed by name
(`hvd.allreduce_`) and as the gradients of an optimizer, in worlds that have hierarchical all-reduce off and on in
turns, and by `dist.all_reduce`. Prints Markdown: medians of the slowest rank's times, how much faster than flat, what
the link allows, and what went over it, in multiples of what was summed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.on_hosts import carried, process_group, run_on_hosts

MINUTES = 3.5
NEEDS_ROOT = True
LAYOUTS = ("2x2", "2x4")
SIZES = (1 << 20, 4 << 20, 16 << 20, 64 << 20)
GLOO, NAMED, BUCKETS = "dist.all_reduce", "by name", "buckets"
_WORLDS = 3
"""With hierarchical all-reduce off, and as many with it on."""
_ROUNDS = 3
"""Of each size in each world."""
_BURST = "256kb"
_PARAMETER = 1 << 17
"""Elements of each of a model's parameters, at most."""


def measure(sizes: Sequence[int]) -> list[dict[str, Any]]:
    """On each rank: sum in all ways, in turns, and tell what the slowest rank and the busiest link saw."""
    import spark_hvd.torch as hvd

    seen: dict[tuple[str, int], list[list[float]]] = {}
    for _ in range(_WORLDS):
        for levels in (False, True):
            hvd.shutdown()
            hvd.init(hierarchical_allreduce=levels)
            for size in sizes:
                ways = _ways(size)
                for number in range(_ROUNDS + 1):
                    for way, (prepare, reduce) in ways.items():
                        if not (levels and way == GLOO):
                            found = _timed(prepare, reduce, size)
                            kept = seen.setdefault((f"{way}, two levels" if levels else way, size), [])
                            kept.extend([found] if number else [])  # the first one warms up
    hvd.shutdown()
    rows = []
    for (way, size), rounds in seen.items():
        seconds, link, cpu = (statistics.median(each) for each in zip(*rounds, strict=True))
        rows.append({"way": way, "nbytes": size, "seconds": seconds, "link": link, "cpu": cpu})
    return rows


def _timed(prepare: Callable[[], object], reduce: Callable[[], object], size: int) -> list[float]:
    """Seconds of the slowest rank, what the busiest link carried in multiples of `size`, and seconds of all cores."""
    import torch
    import torch.distributed as dist

    prepare()
    dist.barrier()
    before, cpu = carried(), time.process_time()
    start = time.perf_counter()
    reduce()
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    dist.barrier()
    link = max(now - then for now, then in zip(carried(), before, strict=True)) / size
    most, total = torch.tensor([seconds, link]), torch.tensor(cpu)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    dist.all_reduce(total)
    return [*most.tolist(), total.item()]


def _ways(size: int) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """Of each way to sum so many bytes: what comes before the clock starts, and what is timed."""
    import torch
    import torch.distributed as dist

    import spark_hvd.torch as hvd

    tensor = torch.empty(size // 4)

    def by_name() -> None:
        hvd.allreduce_(tensor, op=hvd.Sum, name="tensor")
        _check(tensor, hvd.size())

    params = [torch.nn.Parameter(part.clone()) for part in torch.zeros(size // 4).split(_PARAMETER)]
    named = [(str(number), param) for number, param in enumerate(params)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=0.0), named, op=hvd.Sum)

    def prepare() -> None:
        optimizer.step()  # ends the step before
        for param in params:
            param.grad = torch.ones_like(param)

    def buckets() -> None:
        optimizer.synchronize()
        for param in (params[0], params[-1]):
            _check(param.grad, hvd.size())

    fill = partial(tensor.fill_, 1.0)
    return {GLOO: (fill, lambda: dist.all_reduce(tensor)), NAMED: (fill, by_name), BUCKETS: (prepare, buckets)}


def _check(total: Any, ranks: int) -> None:
    ends = [total[0].item(), total[-1].item()]
    if ends != [ranks, ranks]:
        raise RuntimeError(f"first and last element {ends}, expected {ranks} and {ranks}")


def limit(hosts: int, per_host: int) -> float:
    """How much less a host's link carries in two levels than in a ring over all ranks."""
    ranks = hosts * per_host
    return (2 * (ranks - 1) / ranks) / (2 * (hosts - 1) / hosts)


def on_layout(layout: str, rate: str, sizes: Sequence[int]) -> list[str]:
    """Measure with the hosts and ranks of a layout such as "2x4"; a line of the table for each size and pair of ways.

    Raises:
        ValueError: it is written otherwise.
    """
    hosts, found, per_host = layout.partition("x")
    if not (found and hosts.isdigit() and per_host.isdigit() and int(hosts) > 1 and int(per_host) > 1):
        raise ValueError(f"layout {layout!r}: expected HOSTSxRANKS with 2 or more of each, such as 2x4")
    arguments = ["--sizes", *map(str, sizes)]
    rows = run_on_hosts("benchmarks.hierarchy", arguments, int(hosts), rate, per_host=int(per_host), burst=_BURST)
    seen = {(row["way"], row["nbytes"]): row for row in rows}
    lines = []
    for size in sizes:
        for way in (NAMED, BUCKETS):
            gloo, flat, ours = (seen[each, size] for each in (GLOO, way, f"{way}, two levels"))
            busy = f"{ours['cpu'] / ours['seconds'] / (os.cpu_count() or 1):.0%}"
            lines.append(
                f"| {hosts} x {per_host}, {size / (1 << 20):g} MiB {way} | {1e3 * gloo['seconds']:.1f} "
                f"| {1e3 * flat['seconds']:.1f} | {1e3 * ours['seconds']:.1f} "
                f"| {flat['seconds'] / ours['seconds']:.2f} x | {limit(int(hosts), int(per_host)):.2f} x "
                f"| {flat['link']:.2f} | {ours['link']:.2f} | {busy} |"
            )
    return lines


def main() -> None:
    """Measure, print and draw; or, as a host's ranks, measure and write to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="1gbit", help="of every cable, as tc writes it, or none")
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS, help="HOSTSxRANKS")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes to sum")
    parser.add_argument("--png", type=Path, help="where to draw the table")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if min(given.sizes) < 4:
        parser.error(f"--sizes {given.sizes}: expected 4 bytes or more")
    if given.rank is not None:
        with process_group():
            Path(given.rank).write_text(json.dumps(measure(given.sizes)))
        return
    lines = [
        "| hosts x ranks, what | `dist.all_reduce` ms | flat ms | two levels ms | faster | the link's limit "
        "| flat: link carries, x bytes | two levels: link carries, x bytes | ranks' share of all cores |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for line in lines:
        print(line)
    for layout in given.layouts:
        for line in on_layout(layout, given.rate, given.sizes):
            print(line, flush=True)
            lines.append(line)
    if given.png is not None:
        from benchmarks import bars

        bars.draw("\n".join(lines), given.png)


if __name__ == "__main__":
    main()
