"""Synchronous all-reduce on two local ranks: raw torch.distributed beside hvd, in the same processes, in turns.

`python -m benchmarks.allreduce [--sizes 4 1024 ...] [--rounds 15] [--seconds 0.3] [--ranks 2]`

The like-for-like call is `hvd.allreduce_` with op=Sum and a name against `dist.all_reduce`: both reduce in place.
`hvd.allreduce` without a name returns a new tensor and averages, which costs a copy and a division more. What memory
allows is taken for three copies of the tensor by each rank at once: into memory that ranks share, of the sum, and out.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

import spark_hvd.torch as hvd
from benchmarks.common import in_turns, seconds_a_call
from spark_hvd import run_local

MINUTES = 1
SIZES = (4, 1 << 10, 16 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
KINDS = ("dist.all_reduce", "hvd.allreduce_ Sum by name", "hvd.allreduce Average", "three copies")
MOST_CALLS = 200


def _measure(sizes: Sequence[int], rounds: int, seconds: float) -> list[dict[str, float]]:
    """Median seconds a call, for each size in bytes and each kind; float32."""
    return [_row(size, rounds, seconds) for size in sizes]


def _row(size: int, rounds: int, seconds: float) -> dict[str, float]:
    tensor, other = torch.zeros(max(1, size // 4)), torch.zeros(max(1, size // 4))

    def copies() -> None:
        for _ in range(3):
            other.copy_(tensor)

    kinds: dict[str, Callable[[], object]] = {
        KINDS[0]: lambda: dist.all_reduce(tensor),
        KINDS[1]: lambda: hvd.allreduce_(tensor, op=hvd.Sum, name=f"of {size} bytes"),
        KINDS[2]: lambda: hvd.allreduce(tensor),
        KINDS[3]: copies,
    }
    for call in kinds.values():
        seconds_a_call(call, 2, hvd.barrier)
    # Every rank must make the same number of calls, and no rank's clock decides alone.
    pace = float(hvd.allreduce(torch.tensor(seconds_a_call(kinds[KINDS[0]], 3, hvd.barrier)[0]), op=hvd.Max))
    calls = min(MOST_CALLS, max(1, round(seconds / rounds / pace)))
    times = in_turns(KINDS, rounds, lambda kind: seconds_a_call(kinds[kind], calls, hvd.barrier))
    row: dict[str, float] = {"bytes": size, "calls": calls}
    row |= {kind: statistics.median(wall for wall, _ in times[kind]) for kind in KINDS}
    row |= {f"{kind} CPU": statistics.median(cpu for _, cpu in times[kind]) for kind in KINDS}
    # The median of the rounds' own ratios: both calls of a round met the same noise.
    for kind, peer in [(KINDS[1], KINDS[0]), (KINDS[2], KINDS[0]), (KINDS[1], KINDS[3])]:
        for place, what in enumerate(("ratio", "CPU ratio")):
            pairs = zip(times[kind], times[peer], strict=True)
            row[f"{kind} to {peer} {what}"] = statistics.median(ours[place] / its[place] for ours, its in pairs)
    return row


def _table(rows: Sequence[dict[str, float]]) -> str:
    lines = [
        "| bytes | dist.all_reduce us | hvd.allreduce_ by name us | ratio | hvd.allreduce Average us | ratio "
        "| three copies us | by name to it | CPU us: dist.all_reduce | by name | three copies | by name to it |",
        f"|{'---:|' * 12}",
    ]
    for row in rows:
        raw, ours, average, copies = (row[kind] * 1e6 for kind in KINDS)
        raw_cpu, ours_cpu, _, copies_cpu = (row[f"{kind} CPU"] * 1e6 for kind in KINDS)
        to_raw, average_to_raw = (row[f"{kind} to {KINDS[0]} ratio"] for kind in KINDS[1:3])
        to_copies, cpu_to_copies = (row[f"{KINDS[1]} to {KINDS[3]} {what}"] for what in ("ratio", "CPU ratio"))
        lines.append(
            f"| {row['bytes']:,} | {raw:,.0f} | {ours:,.0f} | {to_raw:.3f} | {average:,.0f} | {average_to_raw:.3f} "
            f"| {copies:,.0f} | {to_copies:.2f} | {raw_cpu:,.0f} | {ours_cpu:,.0f} | {copies_cpu:,.0f} "
            f"| {cpu_to_copies:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes of a tensor")
    parser.add_argument("--rounds", type=int, default=15, help="turns, of which the median counts")
    parser.add_argument("--seconds", type=float, default=1.5, help="time for each kind and size, about")
    parser.add_argument("--ranks", type=int, default=2)
    given = parser.parse_args()
    rows = run_local(_measure, args=(given.sizes, given.rounds, given.seconds), num_proc=given.ranks)[0]
    print(_table(rows))


if __name__ == "__main__":
    main()
