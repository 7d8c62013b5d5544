"""What it costs to be watched: hvd.progress in the loop, and the record that a rank sends once a second.

`python -m benchmarks.progress [--rounds 9] [--steps 200] [--empty 100000]`

Two things are measured in each of two ranks: what a step of an empty loop takes longer with hvd.progress, and what one
record takes of the processor; they are set against a step of a small CNN (the smaller the step, the more they weigh).
Then the CNN is trained with and without both, in turns: that difference is below what this kind of machine can show.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn

import spark_hvd.torch as hvd
from benchmarks.common import in_turns
from spark_hvd.context.observe import observe
from spark_hvd.runner.channel.frames import send_frame
from spark_hvd.runner.channel.liveness import HEARTBEAT_SECONDS
from spark_hvd.runner.rank.reporting import VitalsSender

MINUTES = 0.5
BATCH = 32
KINDS = ("unwatched", "watched")


def _empty_loop(count: int) -> float:
    """What a step takes longer with hvd.progress and a metric reported, in seconds; the median of nine."""
    items, loss = [torch.zeros(BATCH, 1)] * count, torch.zeros(())
    more = []
    for _ in range(9):
        start = time.perf_counter()
        for _ in items:
            pass
        bare = time.perf_counter() - start
        start = time.perf_counter()
        loop = hvd.progress(items)
        for _ in loop:
            loop.report(loss=loss)
        more.append((time.perf_counter() - start - bare) / count)
    return statistics.median(more)


def _record(sock: socket.socket) -> float:
    """Processor seconds of one record; the median of a hundred."""
    times = []
    for _ in range(100):
        start = time.thread_time()
        vitals = observe()
        assert vitals is not None
        send_frame(sock, {"type": "vitals", "vitals": vitals.to_message()})
        times.append(time.thread_time() - start)
    return statistics.median(times)


class _Training:
    def __init__(self, rank: int) -> None:
        torch.manual_seed(0)
        self._model = nn.Sequential(
            nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Flatten(),
            nn.LazyLinear(64), nn.ReLU(), nn.Linear(64, 10),
        )  # fmt: skip
        torch.manual_seed(rank)
        self._rows, self._labels = torch.randn(BATCH, 1, 28, 28), torch.randint(0, 10, (BATCH,))
        self._model(self._rows)
        optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01, momentum=0.9)
        self._optimizer = hvd.DistributedOptimizer(optimizer, self._model.named_parameters())

    def run(self, batches: Iterable[int], loop: hvd.Progress[int] | None) -> None:
        for _ in batches:
            self._optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self._model(self._rows), self._labels)
            loss.backward()
            self._optimizer.step()
            if loop is not None:
                loop.report(loss=loss)


def _turn(training: _Training, kind: str, steps: int, sock: socket.socket) -> float:
    """Milliseconds a step."""
    hvd.barrier()
    start = time.perf_counter()
    if kind == "unwatched":
        training.run(range(steps), None)
    else:
        reporting = VitalsSender(lambda vitals: send_frame(sock, {"type": "vitals", "vitals": vitals}))
        reporting.start()
        loop = hvd.progress(range(steps), batch_size=BATCH)
        training.run(loop, loop)
        reporting.stop()
    return 1e3 * (time.perf_counter() - start) / steps


def _measure(rank: int, arguments: argparse.Namespace, sock: socket.socket) -> Iterator[str]:
    training = _Training(rank)
    for kind in KINDS:
        _turn(training, kind, 20, sock)
    rounds = in_turns(KINDS, arguments.rounds, lambda kind: _turn(training, kind, arguments.steps, sock))
    step = statistics.median(rounds["unwatched"]) * 1e-3
    loop, record = _empty_loop(arguments.empty), _record(sock)
    yield "| | takes | of a step |"
    yield "|---|---|---|"
    yield f"| a step of the CNN, two ranks | {1e3 * step:.2f} ms | |"
    yield f"| hvd.progress and report(), each step | {1e6 * loop:.2f} us | {100 * loop / step:.3f} % |"
    percent = 100 * record / HEARTBEAT_SECONDS
    yield f"| a record, each {HEARTBEAT_SECONDS:g} s | {1e6 * record:.0f} us | {percent:.3f} % |"
    yield f"| both | | {100 * (loop / step + record / HEARTBEAT_SECONDS):.3f} % |"
    ratios = [watched / bare for watched, bare in zip(rounds["watched"], rounds["unwatched"], strict=True)]
    shown = " ".join(f"{each:.3f}" for each in sorted(ratios))
    yield f"\nTrained in turns: watched takes {statistics.median(ratios):.3f} x unwatched; by round {shown}"


def _rank(rank: int, meeting: str, arguments: argparse.Namespace) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    hvd.init()
    ours, theirs = socket.socketpair()
    # As a supervisor would, another process takes the records.
    with ours, subprocess.Popen(["cat"], stdin=theirs.fileno(), stdout=subprocess.DEVNULL) as reader:
        theirs.close()
        for line in _measure(rank, arguments, ours):
            if rank == 0:
                print(line, flush=True)
        ours.close()
        reader.wait()
    hvd.shutdown()
    dist.destroy_process_group()


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--empty", type=int, default=100_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, args=(str(Path(folder) / "meeting"), arguments), nprocs=2)


if __name__ == "__main__":
    main()
