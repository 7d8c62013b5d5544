"""The coordinator of named collectives with many ranks, in one process: messages in, decisions out, no sockets.

`python -m benchmarks.coordinator [--ranks 512] [--tensors 200] [--steps 20]`

All ranks reduce the same tensors in every step. Their messages are made beforehand, in the engine's JSON; what is timed
is the coordinator's share: reading a message, deciding, and writing the decisions that follow from it. Each message is
dealt with by itself, which is the worst case: the engine takes in all that has come before it writes. Left out are
ZeroMQ and its encryption, which runs in ZeroMQ's own thread and once for each rank and decision.

The first step meets all names for the first time; in the second they get numbers, by which all later steps name them.
Memory is the peak above the start of the step, by tracemalloc, in a run of its own.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

from spark_hvd.collectives.messages import Learn, Request, encode
from spark_hvd.engine.coordinator import Coordinator

MINUTES = 0.5
PARTS = 10
PARTS_OF_A_STEP = ("decode", "decide", "encode")


def _message(place: int, ids: int, fresh: Sequence[tuple[str, Request]] = ()) -> bytes:
    return json.dumps([place, "ready", f"{ids:x}", fresh], separators=(",", ":")).encode()


def _first_steps(ranks: int, tensors: int) -> list[bytes]:
    """Every rank tells all names in one message."""
    names = [
        (f"module.layers.{number}.weight", Request("allreduce", ["float32"], [[64, number + 1]], "cpu", "AVERAGE"))
        for number in range(tensors)
    ]
    return [_message(place, 0, names) for place in random.sample(range(ranks), ranks)]


def _at_once(ranks: int, ids: Sequence[int]) -> list[bytes]:
    """Every rank tells all numbers in one message."""
    return [_message(place, sum(1 << id for id in ids)) for place in random.sample(range(ranks), ranks)]


def _in_parts(ranks: int, ids: Sequence[int]) -> list[bytes]:
    """Every rank tells its numbers in a few messages, in the same order; the ranks' messages are mixed."""
    parts = [sum(1 << id for id in ids[start::PARTS]) for start in range(min(PARTS, len(ids)))]
    places = [place for place in range(ranks) for _ in parts]
    random.shuffle(places)
    following = [iter(parts) for _ in range(ranks)]
    return [_message(place, next(following[place])) for place in places]


def _one_by_one(ranks: int, ids: Sequence[int]) -> list[bytes]:
    """A message for each tensor of each rank, in any order."""
    messages = [_message(place, 1 << id) for place in range(ranks) for id in ids]
    random.shuffle(messages)
    return messages


def _step(coordinator: Coordinator, messages: Sequence[bytes]) -> tuple[dict[str, float], list[Learn]]:
    """Deal with the messages of all ranks; returns what it took, and which numbers were given."""
    clock = time.perf_counter
    decode = decide = writing = 0.0
    decided = size = 0
    learned: list[Learn] = []
    begun = clock()
    for message in messages:
        start = clock()
        place, _, ids, fresh = json.loads(message)
        requests = [(name, Request(*request)) for name, request in fresh]
        bits = int(ids, 16)
        read = clock()
        decisions = coordinator.submitted(place, bits, requests, read)
        ready = clock()
        if decisions:
            size += len(encode(decisions))
            writing += clock() - ready
            decided += len(decisions)
            learned += [decision for decision in decisions if isinstance(decision, Learn)]
        decode += read - start
        decide += ready - read
    taken = clock() - begun
    assert not coordinator.has_waiting
    return {
        "messages": len(messages),
        "decisions": decided,
        "bytes in": sum(map(len, messages)),
        "bytes out": size,
        "seconds": taken,
        "decode": decode,
        "decide": decide,
        "encode": writing,
    }, learned


def _measure(ranks: int, tensors: int, steps: int) -> list[dict[str, Any]]:
    """One row for each kind of step: medians over the steps; memory where tracemalloc is on."""
    coordinator = Coordinator(range(ranks), cache_capacity=tensors)
    ids: list[int] = []
    rows: list[dict[str, Any]] = []
    kinds: list[tuple[str, Callable[[], list[bytes]], int]] = [
        ("first: all by name", lambda: _first_steps(ranks, tensors), 1),
        ("second: all get numbers", lambda: _first_steps(ranks, tensors), 1),
        ("later: a rank's tensors in one message", lambda: _at_once(ranks, ids), steps),
        (f"later: in {PARTS} messages, ranks mixed", lambda: _in_parts(ranks, ids), steps),
        ("later: one tensor a message, all mixed", lambda: _one_by_one(ranks, ids), steps),
    ]
    for what, arriving, times in kinds:
        taken, peaks = [], []
        for _ in range(times):
            messages = arriving()
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            facts, learned = _step(coordinator, messages)
            ids += [decision.id for decision in learned]
            taken.append(facts)
            peaks.append(tracemalloc.get_traced_memory()[1] - before)
        row: dict[str, Any] = {"step": what, "peak bytes": max(peaks)}
        row |= {key: statistics.median(facts[key] for facts in taken) for key in taken[0]}
        rows.append(row)
    return rows


def _table(rows: Sequence[dict[str, Any]], ranks: int) -> str:
    lines = [
        "| step | messages | ms | us a message | messages/s | decisions | decisions/s | decode, decide, encode "
        "| peak MiB | KiB in | KiB out to each | to all |",
        f"|---|{'---:|' * 11}",
    ]
    for row in rows:
        seconds = row["seconds"]
        whole = sum(row[part] for part in PARTS_OF_A_STEP)
        split = ", ".join(f"{100 * row[part] / whole:.0f} %" for part in PARTS_OF_A_STEP)
        kib_in, kib_out = row["bytes in"] / 1024, row["bytes out"] / 1024
        lines.append(
            f"| {row['step']} | {row['messages']:,.0f} | {seconds * 1e3:,.1f} | "
            f"{seconds * 1e6 / row['messages']:,.1f} | {row['messages'] / seconds:,.0f} | "
            f"{row['decisions']:,.0f} | {row['decisions'] / seconds:,.0f} | {split} | "
            f"{row['peak bytes'] / 2**20:.2f} | {kib_in:,.1f} | {kib_out:,.2f} | {kib_out * (ranks - 1):,.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=512)
    parser.add_argument("--tensors", type=int, default=200)
    parser.add_argument("--steps", type=int, default=20, help="of each later kind, of which the median counts")
    given = parser.parse_args()
    random.seed(0)
    rows = _measure(given.ranks, given.tensors, given.steps)
    tracemalloc.start()
    for row, traced in zip(rows, _measure(given.ranks, given.tensors, 1), strict=True):
        row["peak bytes"] = traced["peak bytes"]
    print(_table(rows, given.ranks))


if __name__ == "__main__":
    main()
