"""Two sequences of launches on one device: buckets by autograd's thread, and named calls by the engine's."""

from __future__ import annotations

import threading
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import spark_hvd.torch as hvd
from spark_hvd.collectives.handle import NamedHandle
from spark_hvd.context.global_state import Context, current
from tests.gpu_sim import nccl
from tests.gpu_sim.device import SimulatedStream, stream
from tests.gpu_sim.named import TOTAL, check
from tests.gpu_sim.order import faults_of_order
from tests.gpu_sim.rank import case, first_device, mutant
from tests.gpu_sim.steps import net, rows


class AtItsEnd(torch.autograd.Function):
    """The identity, whose backward calls a function after the gradients of all parameters behind it."""

    @staticmethod
    def forward(context: Any, value: torch.Tensor, call: Any) -> torch.Tensor:
        context.call = call
        return value.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        context.call()
        return gradient, None


def in_opposite_orders(*names: str | None) -> None:
    """Rank 0 launches its bucket before the named calls, rank 1 after them; then all ranks' launches are compared.

    Args:
        names: Names of the calls, which are in flight together.
    """
    device = first_device()
    model = net().to(device)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=hvd.Sum)
    batch = rows(0, 0).to(device).requires_grad_()
    model(batch).square().mean().backward()  # the plan is made here
    optimizer.step()
    (bucket,) = optimizer._reducer._buckets
    handles: list[NamedHandle[torch.Tensor]] = []
    # As large as the bucket, so that one communicator would confuse the two.
    mine = [torch.full((bucket._flat.numel(),), hvd.rank() + 1.0, device=device) for _ in names]

    def call() -> None:
        handles.extend(hvd.allreduce_async(each, op=hvd.Sum, name=name) for each, name in zip(mine, names, strict=True))

    nccl.forget()
    optimizer.zero_grad()
    if hvd.rank() == 1:
        call()
        for handle in handles:
            handle.wait()
    model(AtItsEnd.apply(batch, call if hvd.rank() == 0 else lambda: None)).square().mean().backward()
    results = [handle.wait() for handle in handles]
    optimizer.step()
    everyone = hvd.allgather_object(list(nccl.launches), name="launches")
    first = [launches[0].communicator for launches in everyone]
    faults = faults_of_order(everyone)
    assert not faults, faults
    assert first[0] != first[1], "nothing was put to the test"
    for result in results:
        check(result, TOTAL)


@case
def a_named_call_beside_buckets_in_another_order() -> None:
    in_opposite_orders("beside")


@case
def calls_without_a_name_beside_buckets_in_another_order() -> None:
    in_opposite_orders(None, None)


@mutant("order: launch 0")
def buckets_on_the_communicator_of_named_calls() -> None:
    def the_same(self: Context, *_: Any) -> dist.ProcessGroup | None:
        return current().queue.communicator.group or dist.group.WORLD  # type: ignore[attr-defined]

    with mock.patch.object(Context, "new_group", the_same):
        in_opposite_orders("beside")


@case
def calls_from_several_threads_while_backward_goes_on() -> None:
    """Every thread has its own order, and ranks have no common one.

    Each also has its own stream. On the stream that training uses, a call may come after a bucket on one rank, and
    the same bucket after the call on another: `faults_of_order` reports that, and devices would hang.
    """
    device = first_device()
    model = net().to(device)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), bucket_cap_mb=0.002)
    faults: list[BaseException] = []

    def calls(thread: int) -> None:
        try:
            for number in range(4):
                with stream(SimulatedStream(device)):
                    mine = torch.full((8,), hvd.rank() + 1.0, device=device)
                    check(hvd.allreduce(mine, op=hvd.Sum, name=f"of thread {thread}, {number % 2}"), TOTAL)
        except BaseException as fault:
            faults.append(fault)

    for _ in range(2):
        threads = [threading.Thread(target=calls, args=[thread]) for thread in range(3)]
        for thread in threads:
            thread.start()
        for step in range(3):
            optimizer.zero_grad()
            model(rows(hvd.rank(), step).to(device)).square().mean().backward()
            optimizer.step()
        for thread in threads:
            thread.join()
    assert not faults, faults
