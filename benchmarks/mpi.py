"""Synchronous all-reduce over MPI on ranks of one host, beside mpi4py's own and Gloo's, in turns in the same processes.

`python -m benchmarks.mpi [--sizes 4 1024 ...] [--rounds 9] [--seconds 1] [--ranks 2]`

All kinds reduce in place with SUM. mpi4py's own is the blocking `Allreduce` of a numpy array: what MPI takes by itself.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.common import in_turns, seconds_a_call

MINUTES = 1.5
SIZES = (4, 256, 1 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20)
RAW = "mpi4py Allreduce"
KINDS = (RAW, "communicator", "dist.all_reduce, mpi4py", "hvd.allreduce_ by name", "dist.all_reduce, Gloo")
MOST_CALLS = 500


def _measure(sizes: Sequence[int], rounds: int, seconds: float) -> list[dict[str, float]]:
    """Median seconds a call, for each size in bytes and each kind; float32."""
    import torch
    import torch.distributed as dist

    import spark_hvd.torch as hvd
    from spark_hvd.context.global_state import current
    from spark_hvd.transport.communicator import ReduceOp
    from spark_hvd.transport.mpi.library import MPI

    hvd.init()
    communicator = current().communicator
    own = MPI.COMM_WORLD.Dup()
    gloo = dist.new_group(backend="gloo")

    def row_of(size: int) -> dict[str, float]:
        tensor = torch.zeros(max(1, size // 4))
        array = tensor.numpy()
        name = f"of {size} bytes"
        calls_of: dict[str, Callable[[], object]] = {
            RAW: lambda: own.Allreduce(MPI.IN_PLACE, array),
            KINDS[1]: lambda: communicator.allreduce(tensor, ReduceOp.SUM).wait(),
            KINDS[2]: lambda: dist.all_reduce(tensor),
            KINDS[3]: lambda: hvd.allreduce_(tensor, op=hvd.Sum, name=name),
            KINDS[4]: lambda: dist.all_reduce(tensor, group=gloo),
        }
        for call in calls_of.values():
            seconds_a_call(call, 3, own.Barrier)
        # Each kind has its own number of calls; every rank must make the same number, so no rank's clock decides alone.
        counts = {}
        for kind, call in calls_of.items():
            pace = own.allreduce(seconds_a_call(call, 3, own.Barrier)[0], MPI.MAX)
            counts[kind] = min(MOST_CALLS, max(1, round(seconds / rounds / pace)))
        times = in_turns(KINDS, rounds, lambda kind: seconds_a_call(calls_of[kind], counts[kind], own.Barrier)[0])
        row: dict[str, float] = {"bytes": size}
        row |= {kind: statistics.median(times[kind]) for kind in KINDS}
        # The median of the rounds' own ratios: all calls of a round met the same noise.
        for kind in KINDS[1:]:
            pairs = zip(times[kind], times[RAW], strict=True)
            row[f"{kind} ratio"] = statistics.median(ours / raw for ours, raw in pairs)
        return row

    return [row_of(size) for size in sizes]


def _table(rows: Sequence[dict[str, float]]) -> str:
    lines = [
        f"| bytes | {RAW} us | " + " | ".join(f"{kind} us | ratio" for kind in KINDS[1:]) + " |",
        "|---:" * (2 * len(KINDS)) + "|",
    ]
    for row in rows:
        cells = [f"{row['bytes']:,}", f"{row[RAW] * 1e6:,.1f}"]
        for kind in KINDS[1:]:
            cells += [f"{row[kind] * 1e6:,.1f}", f"{row[f'{kind} ratio']:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes of a tensor")
    parser.add_argument("--rounds", type=int, default=9, help="turns, of which the median counts")
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each kind and size, about")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if not given.rank:
        # With the mpiexec that came with this Python's MPI.
        mpiexec = str(Path(sys.executable).with_name("mpiexec.hydra"))
        program = [sys.executable, "-m", "benchmarks.mpi", "--rank", *sys.argv[1:]]
        sys.exit(subprocess.run([mpiexec, "-iface", "lo", "-n", str(given.ranks), *program]).returncode)
    rows = _measure(given.sizes, given.rounds, given.seconds)
    import spark_hvd.torch as hvd

    if hvd.rank() == 0:
        print(_table(rows))


if __name__ == "__main__":
    main()
