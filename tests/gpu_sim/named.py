"""Named collectives of tensors on simulated devices: from any thread, stream and current device."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

import spark_hvd.torch as hvd
from spark_hvd.collectives.handle import StreamEvent
from tests.gpu_sim.device import SimulatedStream, current_stream, observed, stream
from tests.gpu_sim.rank import EACH, case, first_device, mutant

SIZE = 2
TOTAL = 3.0
"""The sum of the ranks' tensors: rank r contributes r + 1."""


def mine(device: torch.device, rows: int = 64) -> torch.Tensor:
    """Return this rank's contribution, fresh from a kernel."""
    return torch.full((rows, 4), float(hvd.rank()), device=device) + 1


def other_device() -> torch.device:
    """Return a device that is not the current one."""
    return torch.device("cuda", first_device().index + EACH - 1)


def in_thread(call: Callable[[], Any]) -> Any:
    """Call in a new thread, whose current device is CUDA's first."""
    ends: list[Any] = []

    def run() -> None:
        try:
            ends.append(call())
        except Exception as error:
            ends.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(ends[0], Exception):
        raise ends[0]
    return ends[0]


def check(result: torch.Tensor, expected: float) -> None:
    """Check the numbers, with a kernel on the current stream that uses the result."""
    used = result * 1
    torch.testing.assert_close(used.cpu(), torch.full_like(used, expected, device="cpu"))


def sync(device: torch.device) -> None:
    check(hvd.allreduce(mine(device), op=hvd.Sum, name="sum", prescale_factor=0.5), TOTAL / 2)
    check(hvd.allreduce(mine(device), op=hvd.Average, name="average", postscale_factor=2.0), TOTAL)
    check(hvd.allreduce(mine(device), op=hvd.Max, name="max"), 2.0)
    whole = hvd.allreduce(mine(device).to(torch.int64), op=hvd.Average, name="whole")
    assert whole.device == device
    assert whole.cpu().eq(int(TOTAL / 2)).all()


def in_place(device: torch.device) -> None:
    tensor = mine(device)
    hvd.allreduce_(tensor, op=hvd.Average, name="here", postscale_factor=2.0)
    check(tensor, TOTAL)
    hvd.broadcast_(tensor.add_(hvd.rank()), root_rank=1, name="from one")
    check(tensor, TOTAL + 1)


def asynchronous(device: torch.device) -> None:
    handles = [hvd.allreduce_async(mine(device) * k, op=hvd.Sum, name=f"async {k}") for k in range(4)]
    for k, handle in enumerate(handles):
        check(hvd.synchronize(handle), TOTAL * k)


def grouped(device: torch.device) -> None:
    for result in hvd.grouped_allreduce([mine(device), mine(device, 3)], op=hvd.Sum, name="group"):
        check(result, TOTAL)
    tensors = [mine(device), mine(device, 5).half()]
    hvd.grouped_allreduce_(tensors, op=hvd.Average, name="group here")
    for tensor in tensors:
        check(tensor, TOTAL / 2)


def others(device: torch.device) -> None:
    gathered = hvd.allgather(mine(device, 2 + hvd.rank()), name="gather")
    assert gathered.shape == (5, 4)
    check(gathered[2:], 2.0)
    received, _ = hvd.alltoall(mine(device, 4), splits=[1, 3], name="exchange")
    check(received[-1:], 2.0)
    check(hvd.reducescatter(mine(device, 3), op=hvd.Sum, name="scatter"), TOTAL)
    check(hvd.broadcast(mine(device), root_rank=1, name="give"), 2.0)


KINDS = [sync, in_place, asynchronous, grouped, others]


def all_kinds(device: torch.device) -> None:
    for kind in KINDS:
        kind(device)


@case
def on_the_current_device() -> None:
    all_kinds(first_device())


@case
def on_another_device() -> None:
    all_kinds(other_device())


@case
def from_another_thread() -> None:
    in_thread(lambda: all_kinds(first_device()))


@case
def on_another_device_from_another_thread() -> None:
    in_thread(lambda: all_kinds(other_device()))


@case
def on_a_stream_of_its_own() -> None:
    side = SimulatedStream(first_device())
    side.wait_stream(current_stream())
    with stream(side):
        all_kinds(first_device())


@case
def waited_for_in_another_thread() -> None:
    handle = hvd.allreduce_async(mine(other_device()), op=hvd.Sum, name="elsewhere")
    in_thread(lambda: check(handle.wait(), TOTAL))


@case
def no_host_waits_for_a_known_call() -> None:
    for number in range(4):
        observed.stepping = number > 1
        results = hvd.allreduce(mine(first_device()), op=hvd.Average, name="known")
        results.mul_(2)
    observed.stepping = False
    check(results, TOTAL)


@case
def two_devices_at_once() -> None:
    handles = [
        hvd.allreduce_async(mine(device), op=hvd.Sum, name=f"both {number}")
        for number, device in enumerate([first_device(), other_device()] * 2)
    ]
    for handle in handles:
        check(handle.wait(), TOTAL)


@case
def objects_and_states() -> None:
    model = torch.nn.Linear(4, 4).to(first_device())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (hvd.rank() + 1), momentum=0.9)
    hvd.broadcast_optimizer_state(optimizer, root_rank=1)
    assert optimizer.param_groups[0]["lr"] == 0.2
    assert hvd.allgather_object(hvd.rank()) == [0, 1]


@case
def through_autograd() -> None:
    """The backward of a collective is one too, called by autograd's thread of the device."""
    for device in (first_device(), other_device()):
        here = mine(device).requires_grad_()
        total = hvd.allreduce(here, op=hvd.Sum, name=f"forward {device.index % EACH}")
        total.square().sum().backward()
        assert here.grad is not None
        check(here.grad, 2 * TOTAL * SIZE)


@case
def compressed() -> None:
    check(hvd.allreduce(mine(first_device()), op=hvd.Average, name="half", compression=hvd.Compression.fp16), TOTAL / 2)


@case
def adasum_of_equal_tensors() -> None:
    tensor = torch.arange(8.0, device=other_device())
    result = hvd.allreduce(tensor, op=hvd.Adasum, name="adasum")
    torch.testing.assert_close(result.cpu(), tensor.cpu())


@case
def in_a_process_set() -> None:
    alone = hvd.add_process_set([1])
    try:
        if hvd.rank() == 1:
            check(hvd.allreduce(mine(other_device()), op=hvd.Sum, name="of one", process_set=alone), 2.0)
    finally:
        hvd.remove_process_set(alone)


@case
def barriers() -> None:
    hvd.barrier()


@mutant("not waited for")
def results_that_no_stream_waits_for() -> None:
    with mock.patch.object(StreamEvent, "wait", return_value=None):
        sync(first_device())


def use_in_turn() -> None:
    """A result is used on another stream than that of the next call, and dropped before."""
    side = SimulatedStream(first_device())
    for number in range(3):
        handle = hvd.allreduce_async(mine(first_device()), op=hvd.Sum, name=f"dropped {number}")
        with stream(side):
            result = handle.wait()
            torch.mm(result, result.T)
        del handle, result


@case
def results_used_on_another_stream() -> None:
    use_in_turn()


@mutant("is free for")
def results_that_are_not_recorded() -> None:
    with mock.patch.object(torch.Tensor, "record_stream", return_value=None):
        use_in_turn()
