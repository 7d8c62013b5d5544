"""What the exchange and a commit cost on one GPU: DistributedOptimizer's reducer beside DDP and beside no exchange.

`python -m benchmarks.gpu_step [--rounds 7] [--steps 20] [--models gpt chain resnet50] [--device cuda]`

One process with an NCCL group of one rank: the all-reduces themselves take next to no time, so what is left is what
the hooks, the copies into buckets, the scaling and the waits add to a step. The reducer is told that it is one of two
ranks, as DistributedOptimizer has none for one. Kinds take turns in alternating rounds. Host time is that of the Python
thread until a step is queued. Last come commits and background checkpoints: how long they hold the training.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import spark_hvd.torch as hvd
from benchmarks.common import in_turns
from benchmarks.train_step import Chain
from spark_hvd.collectives.compression import Compression
from spark_hvd.torch.optimizer.arguments import spec_of
from spark_hvd.torch.optimizer.flat import Reduction
from spark_hvd.torch.optimizer.reducer import GradientReducer

MINUTES = 2
NEEDS_GPU = True
WARM_UP = 5
CAP_BYTES = 25 << 20
KINDS = ("no exchange", "DDP", "DDP, bucket views", "spark_hvd", "spark_hvd, fp16", "DDP, fp16 hook")
WORDS, CONTEXT, WIDTH, LAYERS = 32_000, 512, 768, 12


class Gpt(nn.Module):
    """110 million parameters: 12 layers of width 768, for batches of (32, 512) token ids."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 12, 4 * WIDTH, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Of (batch, length) int64 the logits (batch, length, WORDS)."""
        return self.head(self.layers(self.words(ids)))


def _gpt(device: str) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    length, rows = (CONTEXT, 32) if device == "cuda" else (16, 1)
    ids = torch.randint(0, WORDS, (rows, length), device=device)
    return Gpt(), lambda net: nn.functional.cross_entropy(net(ids).flatten(0, 1), ids.flatten())


def _chain(device: str) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    rows = torch.randn(32, 1000, device=device)
    return Chain(), lambda net: net(rows).square().mean()


def _resnet50(device: str) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    build = importlib.import_module("torchvision.models").resnet50
    images = torch.randn(64 if device == "cuda" else 1, 3, 224, 224, device=device)
    labels = torch.randint(0, 1000, (len(images),), device=device)
    return build(), lambda net: nn.functional.cross_entropy(net(images), labels)


MODELS = {"gpt": _gpt, "chain": _chain, "resnet50": _resnet50}


class Training:
    """A model of its own, whose steps are made by one kind.

    Attributes:
        net: The model, wrapped by DDP where the kind says so.
        optimizer: Of its parameters.
    """

    def __init__(self, model: str, kind: str, device: str) -> None:
        torch.manual_seed(0)
        net, self._loss = MODELS[model](device)
        self._device, self._reducer = device, None
        self.net: nn.Module = net.to(device)
        if kind.startswith("DDP"):
            self.net = DistributedDataParallel(self.net, gradient_as_bucket_view="views" in kind)
            if "fp16" in kind:
                from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

                self.net.register_comm_hook(dist.group.WORLD, fp16_compress_hook)
        elif kind.startswith("spark_hvd"):
            self._reducer = _reducer(net, Compression.fp16 if "fp16" in kind else Compression.none)
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.net.parameters(), lr=1e-4, momentum=0.9)

    def step(self) -> None:
        """Queue one step."""
        self.optimizer.zero_grad()
        with torch.autocast(self._device, torch.bfloat16):
            loss = self._loss(self.net)
        loss.backward()
        if self._reducer is not None:
            self._reducer.synchronize()
        self.optimizer.step()
        if self._reducer is not None:
            self._reducer.stepped()

    def timed(self, steps: int) -> tuple[float, float]:
        """Milliseconds a step, and of the host until it is queued."""
        _wait(self._device)
        began, queued = time.perf_counter(), 0.0
        for _ in range(steps):
            start = time.perf_counter()
            self.step()
            queued += time.perf_counter() - start
        _wait(self._device)
        return 1e3 * (time.perf_counter() - began) / steps, 1e3 * queued / steps

    def close(self) -> None:
        """Remove the reducer's hooks."""
        if self._reducer is not None:
            self._reducer.close()


def _reducer(net: nn.Module, compression: Any) -> GradientReducer:
    assert dist.group.WORLD is not None
    named = [*net.named_parameters()]
    return GradientReducer(
        [param for _, param in named],
        [spec_of(name, param) for name, param in named],
        [],
        group=dist.group.WORLD,
        device=torch.device("cpu"),
        reduction=Reduction(0.5, 1.0, compression, False, True, 2, 0, by_nccl=True),
        pipes=None,
        passes=1,
        cap_bytes=CAP_BYTES,
        settings={},
        tracing=mock.Mock(recorder=None),
    )


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _steps(model: str, device: str, rounds: int, steps: int) -> None:
    """Print a table of the kinds."""
    trainings: dict[str, Training] = {}
    memory: dict[str, int] = {}
    for kind in KINDS:
        before = torch.cuda.memory_allocated() if device == "cuda" else 0
        trainings[kind] = Training(model, kind, device)
        trainings[kind].timed(WARM_UP)
        trainings[kind].optimizer.zero_grad()
        memory[kind] = (torch.cuda.memory_allocated() - before) >> 20 if device == "cuda" else 0
    times = in_turns(KINDS, rounds, lambda kind: trainings[kind].timed(steps))
    base = statistics.median(whole for whole, _ in times["no exchange"])
    print(f"\n{model}: | ms a step | of no exchange | ms of the host | MiB held between steps")
    for kind, found in times.items():
        whole, host = (statistics.median(column) for column in zip(*found, strict=True))
        print(f"{kind} | {whole:.2f} | {whole / base:.3f} | {host:.2f} | {memory[kind]}", flush=True)
    for training in trainings.values():
        training.close()


def _held(model: str, device: str, rounds: int, steps: int) -> None:
    """Print how long commits and checkpoints hold the thread that trains, and what steps beside them take."""
    training = Training(model, "no exchange", device)
    training.optimizer = torch.optim.Adam(training.net.parameters(), lr=1e-4)
    training.timed(WARM_UP)
    state = hvd.elastic.TorchState(training.net, training.optimizer)
    size = sum(
        tensor.nbytes
        for holder in [training.net.state_dict(), *training.optimizer.state.values()]
        for tensor in holder.values()
    )
    with tempfile.TemporaryDirectory() as folder:

        def save(number: int) -> Any:
            parts = {"model": training.net.state_dict(), "optimizer": training.optimizer.state_dict()}
            return hvd.checkpoint.save(folder, parts, number, wait=False)

        kinds: dict[str, Callable[[int], Any]] = {
            "nothing": lambda number: None,
            "commit": lambda number: state.save(),
            "checkpoint in the background": save,
        }
        numbers = itertools.count()

        def measure(kind: str) -> tuple[float, float]:
            _wait(device)
            began = time.perf_counter()
            handle = kinds[kind](next(numbers))
            held = 1e3 * (time.perf_counter() - began)
            whole = training.timed(steps)[0]
            if handle is not None:
                handle.wait()
            return held, whole

        found = in_turns([*kinds], rounds, measure, warm_up=1)
    print(f"\n{model} with Adam, {size / 1e9:.2f} GB: | ms held | ms of each of {steps} steps after it")
    for kind, column in found.items():
        held, whole = (statistics.median(values) for values in zip(*column, strict=True))
        print(f"{kind} | {held:.1f} | {whole:.2f}", flush=True)


def main() -> None:
    """Print tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--models", nargs="+", choices=[*MODELS], default=[*MODELS])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    hvd.init()
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if options.device == 'cuda' else 'CPU'}")
    for model in options.models:
        if model == "resnet50" and importlib.util.find_spec("torchvision") is None:
            print("resnet50: there is no torchvision")
            continue
        _steps(model, options.device, options.rounds, options.steps)
    _held(options.models[0], options.device, options.rounds, options.steps)
    hvd.shutdown()


if __name__ == "__main__":
    main()
