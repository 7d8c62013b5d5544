"""Parameter servers beside all-reduces: bytes over each link and time for a step, between hosts with shaped cables.

`sudo python -m benchmarks.parameter_server [--workers 2 4 8] [--rate 100mbit] [--sizes 1024 ...] [--png FILE]`

Each worker, and each of two servers, is a process on a host of its own: a network namespace whose cable carries the
rate and no more (`tc tbf`). A step makes one sum of all workers' gradients and one step of SGD, by: one server, two
servers with half of the parameters each, servers on the workers' hosts, a ring, a tree, and `dist.all_reduce`. Prints
Markdown: what was measured beside what the model says (``benchmarks.alpha_beta``), and the model for up to 512
workers. The model's link is fitted to the ring of the two smallest worlds.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import alpha_beta
from benchmarks.alpha_beta import Cost, Link, Sample
from benchmarks.on_hosts import carried, process_group, run_on_hosts

MINUTES = 2
NEEDS_ROOT = True
SIZES = (1 << 10, 256 << 10, 2 << 20)
SERVERS = 2
"""Hosts with a server and no worker."""
MODEL: dict[str, Cost] = {
    "one server": alpha_beta.parameter_servers(1),
    "two servers": alpha_beta.parameter_servers(SERVERS),
    "servers beside workers": alpha_beta.servers_beside_workers,
    "tree": alpha_beta.tree,
    "ring": alpha_beta.ring,
    "dist.all_reduce": alpha_beta.ring,
}
"""What is measured, and the formula of its time."""
FAR = (8, 32, 128, 512)
FAR_BYTES = 100 << 20
"""About the gradients of ResNet-50 in float32."""
FAR_LINK = Link(30e-6, 8e-9 / 25)
"""Of hosts with 25 Gbit/s and TCP: an assumption."""
FAR_WAYS: dict[str, Cost] = {
    "one server": alpha_beta.parameter_servers(1),
    "tree": alpha_beta.tree,
    "ring": alpha_beta.ring,
    "servers beside workers": alpha_beta.servers_beside_workers,
    "half as many server hosts": lambda link, nbytes, n: alpha_beta.parameter_servers(n // 2)(link, nbytes, n),
    "as many server hosts": lambda link, nbytes, n: alpha_beta.parameter_servers(n)(link, nbytes, n),
}
_RATE = 0.1  # learning rate: any will do
_ROUNDS = 3
_BURST = "32kb"
_LARGE = 64 << 10


@dataclass(frozen=True, slots=True)
class Measured:
    """A step of one kind.

    Attributes:
        way: A key of MODEL.
        workers: Number of workers.
        nbytes: Of the gradients.
        seconds: Median of rounds, of the slowest process in each.
        busiest: Bytes a step over the link that carried the most, in the direction that carried the most.
        worker: The same of the busiest worker's link.
    """

    way: str
    workers: int
    nbytes: int
    seconds: float
    busiest: float
    worker: float


def measure(workers: int, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """On each worker and each server: make the steps, and tell what all of them saw."""
    import torch.distributed as dist

    group = dist.new_group(list(range(workers)))
    rows = []
    for size in sizes:
        for way in MODEL:
            rounds = [_round(way, workers, size, group) for _ in range(_ROUNDS + 1)][1:]  # the first one warms up
            row = {key: statistics.median(each[key] for each in rounds) for key in ("seconds", "busiest", "worker")}
            rows.append({"way": way, "workers": workers, "nbytes": size, **row})
    return rows


def _round(way: str, workers: int, size: int, group: Any) -> dict[str, float]:
    import torch
    import torch.distributed as dist

    rank, numel = dist.get_rank(), size // 4
    gradient, parameters = torch.empty(numel), torch.zeros(numel)
    make = _stepper(way, workers, gradient, parameters, group)
    calls = max(1, min(20, (1 << 20) // size))
    before = carried()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        gradient.fill_(rank + 1)
        make()
    seconds = (time.perf_counter() - start) / calls
    dist.barrier()
    after = carried()
    if rank < workers:
        want = torch.full_like(parameters, -_RATE * calls * (workers + 1) / 2)
        if not torch.allclose(parameters, want, rtol=1e-4):
            raise RuntimeError(f"{way}: parameters {parameters[:4].tolist()}, expected {want[0].item():.6g}")
    seen = torch.zeros(workers + SERVERS, 2)
    seen[rank] = torch.tensor([seconds, max(now - then for now, then in zip(after, before, strict=True)) / calls])
    dist.all_reduce(seen)
    slowest, busiest = seen.max(0).values.tolist()
    return {"seconds": slowest, "busiest": busiest, "worker": seen[:workers, 1].max().item()}


def _stepper(way: str, workers: int, gradient: Any, parameters: Any, group: Any) -> Callable[[], object]:
    """What this process does in a step of this kind."""
    import torch.distributed as dist

    from benchmarks import exchanges

    rank = dist.get_rank()
    if way in ("one server", "two servers"):
        servers = list(range(workers, workers + (1 if way == "one server" else SERVERS)))
        if rank in servers:
            part = parameters.tensor_split(len(servers))[rank - workers]
            return exchanges.Server(part, range(workers), _RATE).step
        if rank < workers:
            return lambda: exchanges.push_and_pull(gradient, parameters, servers)
    if rank >= workers:
        return lambda: None
    if way == "servers beside workers":
        return lambda: exchanges.servers_beside_workers(gradient, parameters, rank, workers, _RATE)
    sums: dict[str, Callable[[], object]] = {
        "ring": lambda: exchanges.ring(gradient, rank, workers),
        "tree": lambda: exchanges.tree(gradient, rank, workers),
        "dist.all_reduce": lambda: dist.all_reduce(gradient, group=group),
    }

    def step() -> None:
        sums[way]()
        parameters.sub_(gradient, alpha=_RATE / workers)

    return step


def between_hosts(workers: int, rate: str, sizes: Sequence[int]) -> list[Measured]:
    """Measure with a worker on each of so many hosts, and SERVERS more hosts."""
    arguments = ["--workers", str(workers), "--sizes", *map(str, sizes)]
    rows = run_on_hosts("benchmarks.parameter_server", arguments, workers + SERVERS, rate, burst=_BURST)
    return [Measured(**row) for row in rows]


def fitted(rows: Sequence[Measured]) -> Link:
    """The link that explains the large rings of the two smallest worlds.

    More processes would share too few cores, and a short message measures how long these take to wake a process up.
    """
    small = sorted({row.workers for row in rows})[:2]
    rings = [row for row in rows if row.way == "ring" and row.workers in small and row.nbytes >= _LARGE]
    return alpha_beta.fit([Sample(row.workers, row.nbytes, row.seconds) for row in rings])


def measured_table(rows: Sequence[Measured], link: Link) -> str:
    """Markdown: time and bytes of each way, the ring's multiples, and how far off the model is."""
    lines = [
        "| workers | bytes | way | ms a step | x the ring | busiest link, x bytes | a worker's link, x bytes "
        "| model ms | off by |",
        "|---:|---:|---|---:|---:|---:|---:|---:|---:|",
    ]
    rings = {(row.workers, row.nbytes): row.seconds for row in rows if row.way == "ring"}
    for row in sorted(rows, key=lambda row: (row.workers, row.nbytes)):
        said = MODEL[row.way](link, row.nbytes, row.workers)
        lines.append(
            f"| {row.workers} | {row.nbytes:,} | {row.way} | {1e3 * row.seconds:.2f} "
            f"| {row.seconds / rings[row.workers, row.nbytes]:.2f} | {row.busiest / row.nbytes:.2f} "
            f"| {row.worker / row.nbytes:.2f} | {1e3 * said:.2f} | {said / row.seconds - 1:+.0%} |"
        )
    return "\n".join(lines)


def far_table(link: Link, nbytes: int, workers: Sequence[int] = FAR) -> str:
    """Markdown: the model's time of an exchange, and where servers and rings cross."""
    lines = [f"| ms a step | {' | '.join(f'{n} workers' for n in workers)} |", "|---|" + "---:|" * len(workers)]
    for name, cost in FAR_WAYS.items():
        lines.append(f"| {name} | {' | '.join(f'{1e3 * cost(link, nbytes, n):,.1f}' for n in workers)} |")
    hosts = " | ".join(str(math.ceil(alpha_beta.servers_to_match(n) - 1e-9)) for n in workers)
    lines.append(f"| server hosts whose links carry what a ring's do | {hosts} |")
    sizes = " | ".join(f"{alpha_beta.bytes_to_match(link, n) / 1024:,.0f} KiB" for n in workers)
    lines.append(f"| one server is faster up to | {sizes} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print and draw; or, as a process on a host, measure and write to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=(2, 4), help="numbers of workers")
    parser.add_argument("--rate", default="100mbit", help="of every cable, as tc writes it, or none")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes of gradients")
    parser.add_argument("--png", type=Path, help="where to draw what was measured, and the model")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        with process_group():
            Path(given.rank).write_text(json.dumps(measure(given.workers[0], given.sizes)))
        return
    if min(given.sizes) < 4 or len({size for size in given.sizes if size >= _LARGE}) < 2:
        parser.error(
            f"--sizes {given.sizes}: expected 4 bytes or more, and two of {_LARGE:,} or more to fit the link to"
        )
    if min(given.workers) < 2:
        parser.error(f"--workers {given.workers}: expected 2 or more")
    rows = [row for workers in given.workers for row in between_hosts(workers, given.rate, given.sizes)]
    link = fitted(rows)
    print(f"rate {given.rate}: alpha {1e6 * link.alpha:.0f} us a message, 1/beta {1e-6 / link.beta:.1f} MB/s\n")
    print(measured := measured_table(rows, link))
    print(f"\n{FAR_BYTES:,} bytes, {8e-9 / FAR_LINK.beta:g} Gbit/s, {1e6 * FAR_LINK.alpha:g} us a message:\n")
    print(far_table(FAR_LINK, FAR_BYTES))
    if given.png is not None:
        from benchmarks import plots

        plots.parameter_server_of(plots.parsed(measured, "way")).savefig(given.png, dpi=110)


if __name__ == "__main__":
    main()
