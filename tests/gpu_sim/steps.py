"""Steps of DistributedOptimizer on simulated devices: two ranks, compared with one process on the rows of both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

import spark_hvd.torch as hvd
from spark_hvd.torch.optimizer.flat import FlatBucket
from tests.gpu_sim import nccl
from tests.gpu_sim.device import SimulatedStream, current_stream, observed, stream
from tests.gpu_sim.rank import case, first_device, mutant

WIDTH = 16
SETTLED = 2
"""Number of steps after which the plan exists, and nothing should wait for a device any more."""

Loss = Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]


def net(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """Return a net, the same on every rank, on the CPU."""
    torch.manual_seed(1)
    return torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(4)])


def rows(rank: int, step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a rank's rows for a step."""
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(step * 10 + rank), dtype=dtype)


def square(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch).float().square().mean()
    return loss


def alone(steps: int, passes: int, dtype: torch.dtype, loss: Loss) -> list[torch.Tensor]:
    """Return the weights that one process gets from the rows of both ranks."""
    model = net(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(passes):
            for rank in range(2):
                (loss(model, rows(rank, step * passes + part, dtype)) / 2).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return [param.detach() for param in model.parameters()]


def train(
    steps: int = 5,
    passes: int = 1,
    dtype: torch.dtype = torch.float32,
    loss: Loss = square,
    place: Callable[[torch.nn.Module], torch.nn.Module] | None = None,
    close: float = 1e-5,
    **options: Any,
) -> None:
    """Train on both ranks, and compare with one process."""
    device = first_device()
    model = net(dtype).to(device) if place is None else place(net(dtype))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        named_parameters=model.named_parameters(),
        bucket_cap_mb=0.002,
        backward_passes_per_step=passes,
        **options,
    )
    batches = [rows(hvd.rank(), number, dtype).to(device) for number in range(steps * passes)]
    before = len(nccl.launches)
    for step in range(steps):
        observed.stepping = step >= SETTLED
        optimizer.zero_grad()
        for part in range(passes):
            loss(model, batches[step * passes + part]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    observed.stepping = False
    assert len(nccl.launches) - before >= 2 * steps
    for mine, theirs in zip(model.parameters(), alone(steps, passes, dtype, loss), strict=True):
        torch.testing.assert_close(mine.detach().cpu(), theirs, rtol=close, atol=close)


@case
def plain() -> None:
    train()


@case
def fp16() -> None:
    train(compression=hvd.Compression.fp16, close=1e-2)


@case
def bf16_parameters() -> None:
    train(dtype=torch.bfloat16, close=5e-2)


@case
def two_passes() -> None:
    train(passes=2)


@case
def predivided() -> None:
    train(gradient_predivide_factor=2.0)


@case
def large_numbers_in_float16() -> None:
    """Float16 can represent their average, but not their sum. NCCL divides, with no kernel of ours before it."""
    device = first_device()
    layer = torch.nn.Linear(64, 1, bias=False, dtype=torch.float16).to(device)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(layer.parameters(), lr=0.1))
    batch = torch.full((1, 64), 200.0, device=device, dtype=torch.float16)
    for step in range(3):
        optimizer.zero_grad(set_to_none=step < 2)  # the last step's gradients are already in their places
        loss = (layer(batch) * 200).sum()
        before = len(observed.kernels)
        loss.backward()
        optimizer.step()
        kernels = [name for name, *_ in observed.kernels[before:]]
        assert layer.weight.grad is not None
        assert layer.weight.grad.cpu().eq(40_000).all()
        scaled = [name for name in kernels[: kernels.index("nccl::all_reduce")] if name.startswith("aten::mul")]
        assert scaled == ["aten::mul.Tensor"] or scaled == ["aten::mul"], scaled  # from the loss


@case
def the_first_bucket_is_on_its_way_before_backward_ends() -> None:
    train()
    kernels = [name for name, *_ in observed.kernels]
    first = len(kernels) - 1 - kernels[::-1].index("aten::mm")
    assert "nccl::all_reduce" in kernels[first - 8 : first], kernels[first - 12 :]


@case
def backward_on_a_stream_of_its_own() -> None:
    side = SimulatedStream()

    def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if not batch.is_cuda:
            return square(model, batch)
        side.wait_stream(current_stream())
        with stream(side):
            result = square(model, batch)
        current_stream().wait_stream(side)
        return result

    train(loss=loss)


@case
def some_parameters_have_no_gradient_in_some_steps() -> None:
    """The host must ask the device for them, on the ranks that lack one; so steps may wait here."""
    device = first_device()
    used, unused = net(), torch.nn.Linear(WIDTH, WIDTH)
    params = [*used.parameters(), *unused.parameters()]
    weights = [param.detach().clone() for param in params]
    used.to(device)
    unused.to(device)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=0.1), bucket_cap_mb=0.002)
    for step in range(4):
        optimizer.zero_grad()
        out = used(rows(hvd.rank(), step).to(device))
        if step % 2 == hvd.rank():
            out = unused(out)
        out.square().mean().backward()
        optimizer.step()
    alone = [torch.nn.Parameter(weight) for weight in weights]
    plain = torch.optim.SGD(alone, lr=0.1)
    for step in range(4):
        plain.zero_grad()
        for rank in range(2):
            out = rows(rank, step)
            for layer in range(4):
                out = torch.nn.functional.linear(out, alone[2 * layer], alone[2 * layer + 1])
            if step % 2 == rank:
                out = torch.nn.functional.linear(out, alone[8], alone[9])
            (out.square().mean() / 2).backward()  # type: ignore[no-untyped-call]
        plain.step()
    for mine, theirs in zip(params, alone, strict=True):
        torch.testing.assert_close(mine.detach().cpu(), theirs.detach(), rtol=1e-4, atol=1e-5)


@case
def clipped_and_scaled() -> None:
    """Reduced gradients are ready after backward, for GradScaler and clipping; neither adds a wait."""
    device = first_device()
    model = net().to(device)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), bucket_cap_mb=0.002)
    for step in range(4):
        optimizer.zero_grad()
        square(model, rows(hvd.rank(), step).to(device)).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with optimizer.skip_synchronize():
            optimizer.step()
    weights = torch.cat([param.detach().flatten() for param in model.parameters()])
    assert torch.equal(weights, hvd.broadcast(weights, root_rank=0, name="of the first"))


def wait_for_nobody(self: FlatBucket) -> None:
    work, self._work = self._work, None
    assert work is not None
    work._in_flight.wait()  # the numbers arrive; no stream waits for them


def wait_on_another_stream(self: FlatBucket) -> None:
    work, self._work = self._work, None
    with stream(SimulatedStream()):
        assert work is not None
        work.wait()


@mutant("not waited for")
def nobody_waits_for_nccl() -> None:
    with mock.patch.object(FlatBucket, "wait", wait_for_nobody):
        train()


@mutant("not waited for")
def another_stream_waits_for_nccl() -> None:
    with mock.patch.object(FlatBucket, "wait", wait_on_another_stream):
        train()
