"""The model of scaling beside what hosts do: all-reduces flat and in two levels, and steps with and without overlap.

`sudo python -m benchmarks.steps_on_hosts [--rate 100mbit] [--layouts 2x1 4x1 8x1 2x2 2x4 4x2] [--png FILE]`

Hosts are network namespaces with shaped cables, so many ranks on each. The link is fitted to the ring of 2 x 1 alone,
and what ranks of a host reach each other by to 1 x 2; all other rows are predicted from these two. A step sleeps
where a model would compute, so that ranks that share this machine's cores do not slow each other down, and reduces
four buckets in a thread as they become ready. Prints Markdown with the model's error, and draws it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.alpha_beta import Bucket, Cost, Link, Sample, Step, fit, ring, step_seconds, two_level
from benchmarks.on_hosts import process_group, run_on_hosts

if TYPE_CHECKING:
    from benchmarks.exchanges import TwoLevel

MINUTES = 2
NEEDS_ROOT = True
LAYOUTS = ("2x1", "4x1", "8x1", "2x2", "2x4", "4x2")
SIZES = (4 << 10, 256 << 10, 1 << 20)
STEP = Step(0.1, 0.4, tuple(Bucket(512 << 10, ready) for ready in (0.25, 0.5, 0.75, 1.0)))
"""2 MiB of gradients."""
_ROUNDS = 5
_BURST = "32kb"


@dataclass(frozen=True, slots=True)
class Seen:
    """A measured median.

    Attributes:
        hosts: Number of hosts.
        per_host: Ranks on each.
        what: "all-reduce", "step" or "step, no overlap".
        way: "ring" or "two levels".
        nbytes: Reduced in it.
        seconds: Of the slowest rank.
    """

    hosts: int
    per_host: int
    what: str
    way: str
    nbytes: int
    seconds: float

    def predicted(self, link: Link, inside: Link) -> float:
        """What the model says of it, in seconds."""
        cost: Cost = two_level(self.per_host, inside) if self.way == "two levels" else ring
        ranks = self.hosts * self.per_host
        if self.what == "all-reduce":
            return cost(link, self.nbytes, ranks)
        return step_seconds(STEP, link, ranks, overlap=self.what == "step", cost=cost)


def measure(per_host: int) -> list[dict[str, Any]]:
    """On each rank: all-reduces and steps, each way that the layout has."""
    import torch
    import torch.distributed as dist

    from benchmarks import exchanges

    rank, ranks = dist.get_rank(), dist.get_world_size()
    ways: dict[str, Callable[[torch.Tensor], object]] = {}
    if ranks > per_host:
        ways["ring"] = lambda tensor: exchanges.ring(tensor, rank, ranks)
    if per_host > 1:
        two: TwoLevel = exchanges.TwoLevel(max(SIZES) // 4, rank, ranks, per_host)
        ways["two levels"] = two
    rows = []
    for way, reduce in ways.items():
        for size in SIZES:
            tensor = torch.ones(size // 4)
            calls = max(1, min(10, (256 << 10) // size))

            def several(tensor: torch.Tensor = tensor, reduce: Any = reduce, calls: int = calls) -> None:
                for _ in range(calls):
                    reduce(tensor.fill_(1.0))

            seconds = _median(several) / calls
            if not torch.equal(tensor, torch.full_like(tensor, ranks)):
                raise RuntimeError(f"{way}: {tensor[:4].tolist()}, expected {ranks}")
            rows.append({"what": "all-reduce", "way": way, "nbytes": size, "seconds": seconds})
        if ranks == per_host:
            continue
        total = sum(bucket.nbytes for bucket in STEP.buckets)
        for what in ("step", "step, no overlap"):
            with ThreadPoolExecutor(1) as sender:
                seconds = _median(lambda what=what, reduce=reduce: _step(what == "step", reduce, sender))  # type: ignore[misc]
            rows.append({"what": what, "way": way, "nbytes": total, "seconds": seconds})
    return [{"hosts": ranks // per_host, "per_host": per_host, **row} for row in rows]


def _step(overlap: bool, reduce: Callable[[Any], object], sender: ThreadPoolExecutor) -> None:
    import torch

    start = time.perf_counter()
    sent = []
    for bucket in STEP.buckets:
        ready = STEP.forward + STEP.backward * (bucket.ready if overlap else 1.0)
        time.sleep(max(0.0, start + ready - time.perf_counter()))
        sent.append(sender.submit(reduce, torch.ones(bucket.nbytes // 4)))
    for future in sent:
        future.result()


def _median(work: Callable[[], object]) -> float:
    """Of rounds that all ranks begin together; the slowest rank's time of each."""
    import torch
    import torch.distributed as dist

    times = []
    for _ in range(_ROUNDS + 1):
        dist.barrier()
        start = time.perf_counter()
        work()
        seconds = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        times.append(seconds.item())
    return statistics.median(times[1:])


def on_layout(layout: str, rate: str) -> list[Seen]:
    """Measure with the hosts and ranks of a layout such as "4x2".

    Raises:
        ValueError: it is written otherwise.
    """
    hosts, found, per_host = layout.partition("x")
    if not (found and hosts.isdigit() and per_host.isdigit()):
        raise ValueError(f"layout {layout!r}: expected HOSTSxRANKS, such as 4x2")
    given = ["--per-host", per_host]
    rows = run_on_hosts("benchmarks.steps_on_hosts", given, int(hosts), rate, per_host=int(per_host), burst=_BURST)
    return [Seen(**row) for row in rows]


def table(rows: Sequence[Seen], link: Link, inside: Link) -> str:
    """Markdown: measured beside predicted."""
    lines = [
        "| hosts x ranks | what | bytes | way | measured ms | predicted ms | off by |",
        "|---|---|---:|---|---:|---:|---:|",
    ]
    for row in rows:
        said = row.predicted(link, inside)
        lines.append(
            f"| {row.hosts} x {row.per_host} | {row.what} | {row.nbytes:,} | {row.way} | {1e3 * row.seconds:.1f} "
            f"| {1e3 * said:.1f} | {said / row.seconds - 1:+.0%} |"
        )
    return "\n".join(lines)


def errors(rows: Sequence[Seen], link: Link, inside: Link) -> str:
    """One sentence for each kind: the median and the largest error, without what the link was fitted to."""
    lines = []
    for what in dict.fromkeys(row.what for row in rows):
        off = [
            abs(row.predicted(link, inside) / row.seconds - 1)
            for row in rows
            if row.what == what and (what != "all-reduce" or row.hosts * row.per_host > 2)
        ]
        if off:
            lines.append(f"{what}: off by {statistics.median(off):.0%} in the median, {max(off):.0%} at most")
    return "; ".join(lines)


def main() -> None:
    """Measure, print and draw; or, as a host's ranks, measure and write to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="100mbit", help="of every cable, as tc writes it, or none")
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS, help="HOSTSxRANKS; 2x1 and 1x2 are always measured")
    parser.add_argument("--png", type=Path, help="where to draw measured and predicted")
    parser.add_argument("--per-host", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        with process_group():
            Path(given.rank).write_text(json.dumps(measure(given.per_host)))
        return
    within = on_layout("1x2", given.rate)
    rows = [row for layout in dict.fromkeys(["2x1", *given.layouts]) for row in on_layout(layout, given.rate)]
    pair = [row for row in rows if row.hosts * row.per_host == 2]
    link, inside = (
        fit([Sample(2, row.nbytes, row.seconds) for row in each if row.what == "all-reduce"]) for each in (pair, within)
    )
    for name, each in (("between hosts", link), ("in a host", inside)):
        print(f"{name}: alpha {1e6 * each.alpha:.0f} us a message, 1/beta {1e-6 / each.beta:.1f} MB/s")
    print("\n" + (text := table(rows, link, inside)))
    print("\n" + errors(rows, link, inside))
    if given.png is not None:
        from benchmarks import plots

        plots.steps_on_hosts_of(plots.parsed(text, "measured ms")).savefig(given.png, dpi=110)


if __name__ == "__main__":
    main()
