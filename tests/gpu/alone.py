"""One GPU and one process: what only a device can show about the gradient reducer and about NCCL.

The reducer works over an NCCL group of one rank, but believes that it is one of two with equal gradients, so the
sum is twice its own. Prints one line per check. SPARK_HVD_TEST_DEVICE=cpu tries the script itself.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import spark_hvd.torch  # noqa: F401
from spark_hvd.collectives.compression import Compression
from spark_hvd.torch.optimizer import flat
from spark_hvd.torch.optimizer.arguments import spec_of
from spark_hvd.torch.optimizer.flat import Reduction
from spark_hvd.torch.optimizer.reducer import GradientReducer
from spark_hvd.transport.host.pages import pinned
from spark_hvd.transport.nccl import NcclGroups

DEVICE = os.environ.get("SPARK_HVD_TEST_DEVICE", "cuda")
ON_GPU = DEVICE == "cuda"
WIDTH, LAYERS, STEPS, SETTLED = 256, 8, 6, 3
HOLD_CYCLES = 20_000_000
MakeOptimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
Wrap = Callable[[torch.nn.Module], Any]


def sgd(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def open_world() -> None:
    backend = "cpu:gloo,cuda:nccl" if ON_GPU else "gloo"
    dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())


class Late:
    """An all-reduce that is delayed on its own stream, and finally doubles the tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(HOLD_CYCLES)
            tensor.mul_(2)
            self._event = torch.cuda.Event()
            self._event.record()
        tensor.record_stream(side)

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)

    def is_completed(self) -> bool:
        return self._event.query()


@contextlib.contextmanager
def doubled(late: bool) -> Iterator[None]:
    """All-reduces of buckets sum this rank and its equal twin."""
    real = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, group: Any = None, async_op: bool = False, **options: Any) -> Any:
        if late:
            return Late(tensor)
        work = real(tensor, group=group, async_op=True, **options)
        assert work is not None
        work.wait()
        tensor.mul_(2)
        return work

    with mock.patch.object(flat.dist, "all_reduce", all_reduce):
        yield


def train(
    make: MakeOptimizer = sgd,
    *,
    compression: Any = Compression.none,
    late: bool = False,
    passes: int = 1,
    side: bool = False,
    wrap: Wrap = lambda net: net,
    sync: str = "default",
) -> torch.Tensor:
    """Return the weights after some steps."""
    torch.manual_seed(0)
    net = wrap(torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]).to(DEVICE))
    params = list(net.parameters())
    optimizer, batch = make(params), torch.randn(64, WIDTH, device=DEVICE)
    assert dist.group.WORLD is not None
    reducer = GradientReducer(
        params,
        [spec_of(f"p{place}", param) for place, param in enumerate(params)],
        [],
        group=dist.group.WORLD,
        device=torch.device("cpu"),
        reduction=Reduction(0.5, 1.0, compression, False, True, 2, 0),
        pipes=None,
        passes=passes,
        cap_bytes=1 << 18,
        settings={},
        tracing=mock.Mock(recorder=None),
    )
    stream = torch.cuda.Stream() if side and ON_GPU else None
    try:
        with doubled(late and ON_GPU):
            for step in range(STEPS):
                if ON_GPU and step == SETTLED:
                    torch.cuda.synchronize()
                    torch.cuda.set_sync_debug_mode(sync)
                optimizer.zero_grad()
                if stream is not None:
                    stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
                    for _ in range(passes):
                        net(batch).square().mean().backward()
                if stream is not None:
                    torch.cuda.current_stream().wait_stream(stream)
                reducer.synchronize()
                optimizer.step()
                reducer.stepped()
    finally:
        if ON_GPU:
            torch.cuda.set_sync_debug_mode("default")
        reducer.close()
    return torch.cat([param.detach().flatten().cpu() for param in params])


def abort_in_flight() -> str:
    """Groups are aborted while their kernel is on the device; the process survives, and a new world works."""
    seconds = []
    for _ in range(3):
        dist.destroy_process_group()
        open_world()
        group = dist.new_group([0])
        tensor = torch.ones(1 << 20, device=DEVICE)
        dist.all_reduce(tensor)
        dist.all_reduce(tensor, group=group)
        torch.cuda.synchronize()
        torch.cuda._sleep(100 * HOLD_CYCLES)
        dist.all_reduce(tensor, async_op=True)
        began = time.monotonic()
        NcclGroups(lambda group=group: [dist.group.WORLD, group]).abort()
        seconds.append(time.monotonic() - began)
    time.sleep(3)  # torch's watchdog would end this process meanwhile
    return f"abort took {max(seconds):.2f} s"


def cost_of_the_correction() -> str:
    """Measure Average's extra multiplication per bucket, as the host does not know whether a rank has joined."""
    buckets = [torch.zeros(1 << 26, device=DEVICE) for _ in range(4)]
    factor, began, ended = torch.ones((), device=DEVICE), *(torch.cuda.Event(enable_timing=True) for _ in range(2))
    for event in (began, ended):
        for bucket in buckets:
            bucket.mul_(factor)
        event.record()
    torch.cuda.synchronize()
    return f"{began.elapsed_time(ended):.2f} ms for 268 million float32 gradients"


def pinned_memory() -> str:
    """Measure the memory that 1.5 GiB of pinned memory takes in parts of 64 MiB."""
    before = torch.cuda.memory.host_memory_stats().get("allocated_bytes.current", 0)
    parts = pinned([64 << 20] * 24)
    taken = torch.cuda.memory.host_memory_stats().get("allocated_bytes.current", 0) - before
    return f"{taken >> 20} MiB for {sum(part.nbytes for part in parts) >> 20}"


def main() -> int:
    """Run all checks; return how many have failed."""
    open_world()
    weights = train()
    scale = float(weights.abs().max())

    def same(bound: float = 1e-5, **options: Any) -> str:
        off = float((train(**options) - weights).abs().max()) / scale
        assert off <= bound, f"weights are off by {off:.1e} of the largest"
        return f"weights within {off:.0e}"

    def runs(make: MakeOptimizer = sgd, **options: Any) -> str:
        assert torch.isfinite(train(make, **options)).all()
        return "runs"

    checks: dict[str, Callable[[], str]] = {
        "no host waits in a step": lambda: same(sync="error"),
        "backward on a stream of its own": lambda: same(side=True),
        "two backward passes a step": lambda: runs(passes=2),
        "AdamW, fused": lambda: runs(lambda params: torch.optim.AdamW(params, fused=True)),
        "torch.compile": lambda: same(1e-3, wrap=torch.compile),
    }
    if ON_GPU:
        checks = {
            "the all-reduce held up on its stream": lambda: same(late=True),
            "the same in fp16": lambda: same(1e-2, late=True, compression=Compression.fp16),
            "AdamW, capturable": lambda: runs(lambda params: torch.optim.AdamW(params, capturable=True)),
            "cost of Average's correction": cost_of_the_correction,
            "pinned memory": pinned_memory,
            **checks,
            "NCCL aborted in flight, three times": abort_in_flight,
        }
    failed = 0
    for name, check in checks.items():
        try:
            print(f"{name}: {check()}", flush=True)
        except Exception as error:
            failed += 1
            traceback.print_exc()
            print(f"{name}: FAILED: {type(error).__name__}: {str(error).splitlines()[:1]}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
