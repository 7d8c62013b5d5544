"""All-reduce of TensorFlow's API on two local ranks beside PyTorch's, in the same processes, in turns.

`python -m benchmarks.tensorflow_calls [--rounds 15] [--calls 100]`
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.common import in_turns, milliseconds_of
from spark_hvd import run_local

MINUTES = 1
Times = dict[str, dict[str, list[float]]]


def _measure(rounds: int, calls: int) -> Times:
    """Median seconds a call of each round, by what is reduced and by how."""
    import tensorflow as tf
    import torch

    import spark_hvd.tensorflow as hvd
    import spark_hvd.torch

    def compiled(function: Callable[..., Any], given: Any) -> Callable[[], Any]:
        """What is reduced is made in the graph and used there, as in a step: to hand 40 tensors back takes 1 ms."""
        there = tf.nest.map_structure(tf.Variable, given)
        return tf.function(
            lambda: tf.add_n(
                tf.nest.flatten(function(tf.nest.map_structure(lambda each: each + 1, there), name="graph"))
            )
        )

    one, forty = torch.zeros(1), [torch.zeros(1024) for _ in range(40)]
    megabytes = torch.zeros(4 << 20)
    tf_one, tf_forty, tf_megabytes = tf.zeros(1), [tf.zeros(1024) for _ in range(40)], tf.zeros(4 << 20)
    cases: dict[str, dict[str, Callable[[], object]]] = {
        "4 B": {
            "torch": lambda: spark_hvd.torch.allreduce(one, name="one"),
            "TensorFlow, eager": lambda: hvd.allreduce(tf_one, name="eager"),
            "tf.function": compiled(hvd.allreduce, tf_one),
        },
        "40 x 4 KiB, grouped": {
            "torch": lambda: spark_hvd.torch.grouped_allreduce(forty, name="forty"),
            "TensorFlow, eager": lambda: hvd.grouped_allreduce(tf_forty, name="eager"),
            "tf.function": compiled(hvd.grouped_allreduce, tf_forty),
        },
        "16 MiB": {
            "torch": lambda: spark_hvd.torch.allreduce(megabytes, name="megabytes"),
            "TensorFlow, eager": lambda: hvd.allreduce(tf_megabytes, name="eager"),
            "tf.function": compiled(hvd.allreduce, tf_megabytes),
        },
    }

    def measured(case: str, kinds: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
        fewer = calls if case != "16 MiB" else max(1, calls // 10)

        def median(kind: str) -> float:
            hvd.barrier()
            return statistics.median(milliseconds_of(kinds[kind], fewer)) / 1e3

        return in_turns([*kinds], rounds, median, warm_up=1)

    return {case: measured(case, kinds) for case, kinds in cases.items()}


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=100, help="calls a round")
    given = parser.parse_args()
    times = run_local(_measure, (given.rounds, given.calls), num_proc=2)[0]
    print("| | | us a call, median | times torch's, median of rounds |")
    print("|---|---|---:|---:|")
    for case, kinds in times.items():
        for kind, found in kinds.items():
            ratio = statistics.median(mine / other for mine, other in zip(found, kinds["torch"], strict=True))
            print(f"| {case} | {kind} | {1e6 * statistics.median(found):.0f} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
