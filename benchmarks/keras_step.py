"""Time of a training step on two ranks with and without exchange: Keras on both backends, torch, and TensorFlow's own.

`python -m benchmarks.keras_step [--rounds 5] [--steps 20] [--models mlp cnn]`

Each kind has two processes of its own, and all kinds measure in turns. "Without exchange" both ranks train at once,
each for itself. The layers are those of benchmarks.train_step, with SGD and momentum, a batch of 32, a thread a rank.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from benchmarks.common import milliseconds_of

MINUTES = 3
BATCH = 32
CLASSES = 10
WARM_UP = 5
SHAPES = {"mlp": (784,), "cnn": (28, 28, 1)}
KINDS = {
    "torch": "spark_hvd.torch",
    "keras-torch": "spark_hvd.keras on torch, fit",
    "keras-tensorflow": "spark_hvd.keras on TensorFlow, fit",
    "tape": "spark_hvd.tensorflow, DistributedGradientTape in a tf.function",
    "strategy": "MultiWorkerMirroredStrategy in a tf.function",
}
Block = Callable[[int], list[float]]
"""So many steps, and the milliseconds of each."""


def _each(step: Callable[[], object]) -> Block:
    return partial(milliseconds_of, step)


# ---- one rank -------------------------------------------------------------------------------------------------------


def _layers(model: str) -> Any:
    import keras
    from keras import layers

    random.seed(0)  # where Keras gets its seeds; its own function would import TensorFlow on torch, too
    if model == "mlp":
        hidden = [layers.Dense(2048, "relu") for _ in range(3)]
        return keras.Sequential([keras.Input(SHAPES[model]), *hidden, layers.Dense(CLASSES)])
    return keras.Sequential([
        keras.Input(SHAPES[model]),
        layers.Conv2D(16, 3, padding="same", activation="relu"), layers.MaxPooling2D(),
        layers.Conv2D(32, 3, padding="same", activation="relu"), layers.MaxPooling2D(),
        layers.Flatten(), layers.Dense(128, "relu"), layers.Dense(CLASSES),
    ])  # fmt: skip


def _rows(model: str, rank: int, count: int) -> tuple[Any, Any]:
    import numpy as np

    numbers = np.random.default_rng(rank)
    return numbers.standard_normal((count, *SHAPES[model]), "float32"), numbers.integers(0, CLASSES, count)


def _torch_blocks(model: str, rank: int) -> dict[str, Block]:
    import torch

    from benchmarks.train_step import MODELS
    from spark_hvd.torch.optimizer.distributed import DistributedOptimizer

    build, shape, classes = MODELS[model]
    rows, labels = torch.randn(shape), torch.randint(0, classes, (BATCH,))

    def block(*, exchange: bool) -> Block:
        torch.manual_seed(0)
        net = build()
        optimizer: Any = torch.optim.SGD(net.parameters(), lr=1e-4, momentum=0.9)
        if exchange:
            optimizer = DistributedOptimizer(optimizer, net.named_parameters())
        criterion = torch.nn.CrossEntropyLoss()

        def step() -> None:
            optimizer.zero_grad()
            criterion(net(rows), labels).backward()
            optimizer.step()

        return _each(step)

    return {"local": block(exchange=False), "exchange": block(exchange=True)}


def _keras_blocks(model: str, rank: int) -> dict[str, Block]:
    import keras

    import spark_hvd.keras as hvd

    class Clock(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.ends = [time.perf_counter()]

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.ends.append(time.perf_counter())

    def block(*, exchange: bool) -> Block:
        net = _layers(model)
        optimizer = keras.optimizers.SGD(1e-4, momentum=0.9)
        net.compile(
            hvd.DistributedOptimizer(optimizer) if exchange else optimizer,
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )

        def steps(count: int) -> list[float]:
            rows, labels = _rows(model, rank, BATCH * (count + 1))
            clock = Clock()
            net.fit(rows, labels, BATCH, verbose=0, shuffle=False, callbacks=[clock])
            return [1e3 * (end - begin) for begin, end in zip(clock.ends[1:], clock.ends[2:], strict=False)]

        return steps

    return {"local": block(exchange=False), "exchange": block(exchange=True)}


def _loop(model: str, rank: int, gradient: Callable[[Any, Any, Any], Any]) -> tuple[Any, Callable[[], Any]]:
    """A model and a step of a loop by hand."""
    import keras
    import tensorflow as tf

    net = _layers(model)
    optimizer = keras.optimizers.SGD(1e-4, momentum=0.9)
    optimizer.build(net.trainable_variables)
    rows, labels = map(tf.constant, _rows(model, rank, BATCH))

    def step() -> Any:
        with tf.GradientTape() as tape:
            logits = net(rows, training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
        optimizer.apply(gradient(tape, loss, net.trainable_weights), net.trainable_variables)
        return loss

    return net, step


def _tape_blocks(model: str, rank: int) -> dict[str, Block]:
    import tensorflow as tf

    import spark_hvd.tensorflow as hvd

    _, alone = _loop(model, rank, lambda tape, loss, weights: tape.gradient(loss, weights))
    _, shared = _loop(
        model, rank, lambda tape, loss, weights: hvd.DistributedGradientTape(tape).gradient(loss, weights)
    )
    return {"local": _each(tf.function(alone)), "exchange": _each(tf.function(shared))}


def _strategy_blocks(model: str, rank: int) -> dict[str, Block]:
    import tensorflow as tf

    strategy = STRATEGY[0]

    def halved(tape: Any, loss: Any, weights: Any) -> Any:  # Keras' optimizer sums them over the ranks
        return tape.gradient(loss, weights, output_gradients=tf.constant(1 / strategy.num_replicas_in_sync))

    _, alone = _loop(model, rank, lambda tape, loss, weights: tape.gradient(loss, weights))
    with strategy.scope():
        _, shared = _loop(model, rank, halved)
    return {
        "local": _each(tf.function(alone)),
        "exchange": _each(tf.function(lambda: strategy.run(shared))),
    }


STRATEGY: list[Any] = []
"""Can be made once in a process, and before TensorFlow has computed anything."""


def _rank(kind: str, rank: int, meeting: str, port: int) -> None:
    """Measure what the lines of stdin name, and print milliseconds."""
    barrier: Callable[[], object]
    if kind == "strategy":
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(2)
        workers = [f"127.0.0.1:{port}", f"127.0.0.1:{port + 1}"]
        os.environ["TF_CONFIG"] = json.dumps(
            {"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}}
        )
        STRATEGY.append(tf.distribute.MultiWorkerMirroredStrategy())
        meet = tf.function(
            lambda: STRATEGY[0].run(lambda: tf.distribute.get_replica_context().all_reduce("sum", tf.ones(())))
        )
        barrier = meet
    else:
        import torch
        import torch.distributed as dist

        from spark_hvd.context.init import init
        from spark_hvd.torch.move import barrier as meet_all

        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
        init()
        barrier = meet_all
    makers = {
        "torch": _torch_blocks,
        "keras-torch": _keras_blocks,
        "keras-tensorflow": _keras_blocks,
        "tape": _tape_blocks,
        "strategy": _strategy_blocks,
    }
    blocks: dict[str, dict[str, Block]] = {}
    for line in sys.stdin:
        model, way, steps = line.split()
        if model not in blocks:
            blocks[model] = makers[kind](model, rank)
            for block in blocks[model].values():
                block(WARM_UP)
        barrier()
        start = time.process_time()
        times = blocks[model][way](int(steps))
        print(json.dumps([statistics.median(times), 1e3 * (time.process_time() - start) / len(times)]), flush=True)


# ---- all of them ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _world(kind: str, folder: str) -> Iterator[Callable[[str, str, int], tuple[float, float]]]:
    """Two ranks, and a function that lets them measure milliseconds per step, in wall time and in processor time."""
    backend = "torch" if kind == "keras-torch" else "tensorflow"
    with contextlib.closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {
        **os.environ,
        "KERAS_BACKEND": backend,
        "OMP_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, "-m", "benchmarks.keras_step", "--rank", kind]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), f"{folder}/{kind}", str(port)],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]

    def measure(model: str, way: str, steps: int) -> tuple[float, float]:
        for each in ranks:
            assert each.stdin is not None
            each.stdin.write(f"{model} {way} {steps}\n")
            each.stdin.flush()
        lines = [each.stdout.readline() for each in ranks if each.stdout is not None]
        if not all(lines):
            raise RuntimeError(f"a process of {kind!r} ended; see above for why")
        wall, cpu = json.loads(lines[0])
        return wall, cpu

    try:
        yield measure
    finally:
        for each in ranks:
            each.kill()
            each.wait()


def main() -> None:
    """Measure and print a table for each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--rank", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        _rank(given.rank[0], int(given.rank[1]), given.rank[2], int(given.rank[3]))
        return
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        worlds = {kind: stack.enter_context(_world(kind, folder)) for kind in given.kinds}
        for model in given.models:
            times: Times = {kind: {"local": [], "exchange": []} for kind in worlds}
            for number in range(given.rounds):
                for kind in list(worlds) if number % 2 else list(worlds)[::-1]:
                    for way in ("local", "exchange") if number % 2 else ("exchange", "local"):
                        times[kind][way].append(worlds[kind](model, way, given.steps))
            _report(model, times)


Times = dict[str, dict[str, list[tuple[float, float]]]]


def _report(model: str, times: Times) -> None:
    print(f"\n{model}: ms a step, medians over rounds")
    print("| | without exchange | with | ms more | times | by round | CPU ms without | with | more |")
    print("|---|---:|---:|---:|---:|---|---:|---:|---:|")
    for kind, ways in times.items():
        local, shared = ([wall for wall, _ in ways[way]] for way in ("local", "exchange"))
        cpu_local, cpu_shared = ([cpu for _, cpu in ways[way]] for way in ("local", "exchange"))
        cpu_more = statistics.median(mine - other for mine, other in zip(cpu_shared, cpu_local, strict=True))
        ratios = sorted(mine / other for mine, other in zip(shared, local, strict=True))
        more = statistics.median(mine - other for mine, other in zip(shared, local, strict=True))
        print(
            f"| {KINDS[kind]} | {statistics.median(local):.2f} | {statistics.median(shared):.2f} | {more:.2f} "
            f"| {statistics.median(ratios):.2f} | {ratios[0]:.2f}-{ratios[-1]:.2f} "
            f"| {statistics.median(cpu_local):.2f} | {statistics.median(cpu_shared):.2f} | {cpu_more:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
