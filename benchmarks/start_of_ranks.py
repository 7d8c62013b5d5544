"""Start of many ranks on one machine: a run of ranks that all-reduce by name once and train a small model for 20 steps.

    python -m benchmarks.start_of_ranks --ranks 8 32 96 --rounds 3

Warm: one session with a slot for each rank; the first run of each size is not counted, which starts Spark's workers and
the fork server. All ranks share this machine's cores, so the work of all of them counts, as well as what they wait for:
"CPU s" is that of Spark, its workers and the ranks, and says more than seconds where the machine has other work.

Growth is the power of the number of ranks that fits best; what grows as n log n would have the one beside it.

On hosts of their own ranks do not share cores. The last table says what rank 0, which has the most to do, and any other
work then: it is measured here among few ranks that take each other for other hosts, so they use no shared memory, and
drawn out in a straight line (each message, key and connection is one of n - 1 for a rank). The time is that of rank 0
or of the busiest other in each part, whichever is longer, and of messages that wait for each other: 21 rings of
2 (n - 1), and trees of log2 n for each exchange of facts. Spark's own start of a stage of so many tasks is not in it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any

import psutil

from benchmarks.common import session

MINUTES = 3
PARTS = ("enter", "all-reduce", "first step", "19 steps", "leave")
WORK = ("join", "all-reduce", "first step", "19 steps", "leave")
RINGS = 21
ALPHA = 50e-6
"""Seconds that a message takes between two hosts, assumed."""


def work(mark: Callable[[], object]) -> None:
    """What each rank does in its world; `mark` is called after each part."""
    import torch

    import spark_hvd.torch as hvd

    torch.set_num_threads(1)
    mark()
    total = hvd.allreduce(torch.ones(1), op=hvd.Sum, name="one")
    assert total.item() == hvd.size()
    mark()
    model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    for step in range(20):
        optimizer.zero_grad()
        model(torch.randn(16, 20)).square().mean().backward()
        optimizer.step()
        if step in (0, 19):
            mark()


def rank_main() -> list[float]:
    """When this rank had entered the world, and had done each of the parts."""
    times: list[float] = []
    work(lambda: times.append(time.time()))
    return times


def processor_seconds() -> float:
    """Of this process and all below it, with those that have ended."""
    me = psutil.Process()
    return sum(sum(each.cpu_times()[:4]) for each in (me, *me.children(recursive=True)))


def timed(spark: Any, ranks: int) -> list[float]:
    """Seconds of the whole, of processors, then of each part, to the last rank."""
    import spark_hvd

    started, before = time.time(), processor_seconds()
    times = spark_hvd.run(rank_main, num_proc=ranks, spark=spark, verbose=0)
    ends = [started, *(max(column) for column in zip(*times, strict=True)), time.time()]
    spent = processor_seconds() - before
    return [ends[-1] - started, spent, *(after - before for before, after in pairwise(ends))]


def power(sizes: Sequence[int], values: Sequence[float]) -> float:
    """The power of the size that fits best."""
    slope, _ = statistics.linear_regression([math.log(size) for size in sizes], [math.log(value) for value in values])
    return slope


# ---- ranks that take each other for other hosts ---------------------------------------------------------------------


def on_hosts(ranks: int) -> None:
    """Print the processor seconds of each part, of each rank; run in a process of its own."""
    import gc

    import torch

    import spark_hvd.torch
    from spark_hvd.world.ports import listen

    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])  # imports more
    gc.freeze()
    listener = listen("127.0.0.1", None)
    children = []
    for rank in range(ranks):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                os.write(writing, json.dumps(_on_host(rank, ranks, listener)).encode())
                status = 0
            finally:
                os._exit(status)
        os.close(writing)
        children.append((child, reading))
    del spark_hvd
    rows = []
    for child, reading in children:
        with open(reading) as said:
            rows.append(said.read())
        os.waitpid(child, 0)
    if not all(rows):
        sys.exit(f"{rows.count('')} of {ranks} ranks failed")
    print(f"[{','.join(rows)}]")


def _on_host(rank: int, ranks: int, listener: Any) -> list[float]:
    import spark_hvd.torch as hvd
    from spark_hvd.context.init import join
    from spark_hvd.transport.torch_private import TCPStore
    from spark_hvd.world.layout import Endpoint, World, WorldLayout

    port = listener.getsockname()[1]
    marks = [time.process_time()]
    patience = timedelta(seconds=300)
    if rank == 0:
        kv = TCPStore(
            "127.0.0.1", port, ranks, True, patience, wait_for_workers=False, master_listen_fd=listener.fileno()
        )
    else:
        kv = TCPStore("127.0.0.1", port, ranks, False, patience)
    layout = WorldLayout.of_ranks([f"host-{number}" for number in range(ranks)])
    join(World(layout.ranks[rank], Endpoint("127.0.0.1", port), secret=b"0" * 32), kv, timeout=300.0)
    work(lambda: marks.append(time.process_time()))
    kv.add("done", 1)
    while rank == 0 and kv.add("done", 0) < ranks:  # it serves the store
        time.sleep(0.05)
    hvd.shutdown()
    marks.append(time.process_time())
    return [after - before for before, after in pairwise(marks)]


def measured_on_hosts(ranks: int) -> tuple[list[float], list[float]]:
    """Processor seconds of each part: of rank 0, and of the busiest other."""
    command = [sys.executable, "-m", "benchmarks.start_of_ranks", "--one-world", str(ranks)]
    rows = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[-1])
    return rows[0], [max(column) for column in zip(*rows[1:], strict=True)]


def print_hosts(sizes: Sequence[int], rounds: int, wanted: Sequence[int]) -> None:
    """Measure worlds of a few sizes, and print what larger ones would take."""
    firsts, others = [], []
    for size in sizes:
        found = [measured_on_hosts(size) for _ in range(rounds)]
        firsts.append([statistics.median(column) for column in zip(*(first for first, _ in found), strict=True)])
        others.append([statistics.median(column) for column in zip(*(other for _, other in found), strict=True)])

    def drawn_out(rows: list[list[float]], hosts: int) -> list[float]:
        lines = [statistics.linear_regression(sizes, column) for column in zip(*rows, strict=True)]
        return [max(line.slope * hosts + line.intercept, 0.0) for line in lines]

    print(f"\n| hosts of one rank | predicted s | messages that wait, s | {' | '.join(WORK)} |")
    print(f"|{'---|' * (len(WORK) + 3)}")
    for hosts in wanted:
        if hosts in sizes:
            first, other = firsts[list(sizes).index(hosts)], others[list(sizes).index(hosts)]
        else:
            first, other = drawn_out(firsts, hosts), drawn_out(others, hosts)
        waits = ALPHA * (RINGS * 2 * (hosts - 1) + EXCHANGES * (1 + math.ceil(math.log2(hosts))))
        longest = [max(pair) for pair in zip(first, other, strict=True)]
        cells = " | ".join(f"{one:.3f} / {two:.3f}" for one, two in zip(first, other, strict=True))
        print(f"| {hosts} | {sum(longest) + waits:.2f} | {waits:.2f} | {cells} |", flush=True)
    print(
        f"\nProcessor seconds of rank 0 / of the busiest other. Measured: {', '.join(map(str, sizes))}; the others are "
        f"drawn out of these. Assumed: {ALPHA * 1e6:.0f} us a message between hosts."
    )


EXCHANGES = 2
"""Of facts, until the first step has ended: the group's connections, and the plan."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 32, 96])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--hosts", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--one-world", type=int)
    args = parser.parse_args()
    if args.one_world is not None:
        on_hosts(args.one_world)
        return
    spark = session(max(args.ranks))
    print(f"| ranks | s | min-max s | CPU s | {' | '.join(PARTS)} |\n|{'---|' * (len(PARTS) + 4)}")
    whole, spent = [], []
    for ranks in args.ranks:
        timed(spark, ranks)
        rows = [timed(spark, ranks) for _ in range(args.rounds)]
        middle = [statistics.median(column) for column in zip(*rows, strict=True)]
        whole.append(middle[0])
        spent.append(middle[1])
        span = f"{min(row[0] for row in rows):.1f}-{max(row[0] for row in rows):.1f}"
        parts = " | ".join(f"{seconds:.2f}" for seconds in middle[2:])
        print(f"| {ranks} | {middle[0]:.1f} | {span} | {middle[1]:.1f} | {parts} |", flush=True)
    spark.stop()
    if len(args.ranks) > 1:
        logarithmic = power(args.ranks, [size * math.log2(size) for size in args.ranks])
        print("\n| growth | power of ranks | n log n |\n|---|---|---|")
        for name, values in (("s", whole), ("CPU s", spent)):
            print(f"| {name} | {power(args.ranks, values):.2f} | {logarithmic:.2f} |")
    print_hosts(args.hosts, args.rounds, [*args.hosts, 128, 512])


if __name__ == "__main__":
    main()
