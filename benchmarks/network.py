"""All-reduce between hosts by size over a network of a given rate, and the latency and bandwidth that explain it.

`sudo python -m benchmarks.network --rate 1gbit [--hosts 2] [--sizes 4 1024 ...] [--seconds 1]`

Hosts are network namespaces of this machine, one rank each, whose cables carry the rate and no more (`tc tbf`; the
kernel's own latency, some 30 us, stays). Prints CSV: hosts,size_bytes,seconds_median; then, as a comment, the ring
that explains it best (``benchmarks.alpha_beta``): alpha seconds a message, beta bytes a second.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.alpha_beta import Sample, fit
from benchmarks.on_hosts import process_group, run_on_hosts

MINUTES = 1
NEEDS_ROOT = True
SIZES = (4, 1 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
_ROUNDS = 7


def measure(sizes: Sequence[int], seconds: float) -> list[tuple[int, float]]:
    """Median seconds of a Gloo all-reduce of float32, on the ranks of the default group."""
    import torch
    import torch.distributed as dist

    rows = []
    for size in sizes:
        tensor = torch.zeros(max(1, size // 4))

        def call(calls: int, tensor: torch.Tensor = tensor) -> float:
            dist.barrier()
            start = time.perf_counter()
            for _ in range(calls):
                dist.all_reduce(tensor)
            return (time.perf_counter() - start) / calls

        call(1)
        pace = torch.tensor(call(1))
        dist.all_reduce(pace, op=dist.ReduceOp.MAX)  # every rank must make the same number of calls
        calls = min(200, max(1, round(seconds / _ROUNDS / float(pace))))
        rows.append((size, statistics.median(call(calls) for _ in range(_ROUNDS))))
    return rows


def between_hosts(count: int, rate: str, sizes: Sequence[int], seconds: float) -> list[tuple[int, float]]:
    """(bytes, median seconds) for each size, measured with a rank on each of so many hosts (see ``run_on_hosts``)."""
    arguments = ["--seconds", str(seconds), "--sizes", *map(str, sizes)]
    return [(size, median) for size, median in run_on_hosts("benchmarks.network", arguments, count, rate)]


def main() -> None:
    """Measure and print; or, as a rank, measure and write to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="1gbit", help="of every cable, as tc writes it, or none")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes of a tensor")
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each size, about")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        with process_group():
            Path(given.rank).write_text(json.dumps(measure(given.sizes, given.seconds)))
        return
    rows = between_hosts(given.hosts, given.rate, given.sizes, given.seconds)
    link = fit([Sample(given.hosts, size, median) for size, median in rows])
    print("hosts,size_bytes,seconds_median")
    for size, median in rows:
        print(f"{given.hosts},{size},{median:.6g}")
    print(f"# rate {given.rate}, {given.hosts} hosts: alpha {link.alpha:.3g} s, beta {1 / link.beta:.4g} bytes/s")


if __name__ == "__main__":
    main()
