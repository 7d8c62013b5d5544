"""What else happens to ranks with GPUs: join, vitals, commits, SyncBatchNorm, two devices; all on simulated devices."""

from __future__ import annotations

import contextlib
import threading
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import spark_hvd.torch as hvd
from spark_hvd.checkpoint.background import Memory, copied
from spark_hvd.collectives.handle import NamedHandle
from spark_hvd.collectives.queue import NegotiatedQueue
from spark_hvd.context.observe import observe
from spark_hvd.elastic.skeleton import tensor_key
from spark_hvd.elastic.snapshot import Snapshots
from spark_hvd.torch.optimizer import hooks
from spark_hvd.world.errors import PlanMismatchError
from tests.gpu_sim import nccl
from tests.gpu_sim.device import SimulatedStream, observed
from tests.gpu_sim.named import TOTAL, check, mine, other_device
from tests.gpu_sim.rank import case, first_device, mutant
from tests.gpu_sim.steps import WIDTH, net, rows, square


def one_joins_early(device: torch.device) -> None:
    """Rank 1 has no more data; rank 0 continues alone."""
    if hvd.rank() == 0:
        check(hvd.allreduce(mine(device), op=hvd.Sum, name="alone"), 1.0)
        handles = [hvd.allreduce_async(mine(device), op=hvd.Sum, name=f"alone {k}") for k in range(3)]
        for handle in handles:
            check(handle.wait(), 1.0)
        gathered = hvd.allgather(mine(device, 2), name="rows of one")
        assert gathered.shape == (2, 4)
    hvd.join()


@case
def join_by_name() -> None:
    one_joins_early(first_device())


@case
def join_in_a_thread_whose_device_was_chosen_there() -> None:
    torch.cuda.set_device(0)
    errors: list[BaseException] = []

    def run() -> None:
        torch.cuda.set_device(first_device())
        try:
            one_joins_early(first_device())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not errors, errors


@case
def join_of_an_optimizer() -> None:
    model = net().to(first_device())
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), bucket_cap_mb=0.002)
    for step in range(5 - hvd.rank() * 2):
        optimizer.zero_grad()
        square(model, rows(hvd.rank(), step).to(first_device())).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    hvd.join()
    weights = torch.cat([param.detach().flatten() for param in model.parameters()])
    kept = hvd.broadcast(weights, root_rank=0, name="weights of the last")
    assert torch.isfinite(kept).all()


@mutant("another rank's")
def stand_ins_on_the_device_of_the_engine() -> None:
    keep = NegotiatedQueue.join

    def join(self: NegotiatedQueue, counts: bool, device: torch.device | None) -> NamedHandle[int]:
        return keep(self, counts, None)

    with mock.patch.object(NegotiatedQueue, "join", join):
        one_joins_early(first_device())
    if hvd.rank() == 0:  # its device is the engine's by chance
        raise AssertionError("another rank's")


class NVMLError(Exception):
    """Like pynvml's."""


@case
def vitals_are_those_of_the_ranks_device() -> None:
    held = {first_device().index: 5000}
    seen = []
    with (
        mock.patch.object(torch.cuda, "memory_reserved", side_effect=lambda device=0: held.get(device, 0)),
        mock.patch.object(torch.cuda, "utilization", side_effect=lambda device=0: 40 + device),
    ):
        thread = threading.Thread(target=lambda: seen.append(observe()))
        thread.start()
        thread.join()
    vitals = seen[0]
    assert vitals is not None
    assert vitals.gpu_memory_bytes == 5000
    assert vitals.gpu_utilization == (40 + first_device().index) / 100


@case
def vitals_without_word_from_nvml() -> None:
    with (
        mock.patch.object(torch.cuda, "memory_reserved", return_value=1),
        mock.patch.object(torch.cuda, "utilization", side_effect=NVMLError("Not Supported")),
    ):
        vitals = observe()
    assert vitals is not None
    assert vitals.gpu_utilization is None


@case
def commits() -> None:
    model = net().to(first_device())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    snapshots = Snapshots()
    params = list(model.parameters())
    stable = {tensor_key(param) for param in params}
    for number in range(4):
        optimizer.zero_grad()
        square(model, rows(0, number).to(first_device())).backward()  # type: ignore[no-untyped-call]
        snapshots.wait_copied()
        optimizer.step()
        expected = [param.detach().cpu() for param in params]
        observed.stepping = number > 1
        snapshots.take(number, {"model": params}, stable=stable)
        observed.stepping = False
    last = snapshots.last()
    assert last is not None
    for one, other in zip(last.value("model", own=True), expected, strict=True):
        assert one.device == first_device()
        assert torch.equal(one.cpu(), other)
    assert len(observed.pinned) == 2, observed.pinned  # two sets of buffers, each in one piece


@mutant("not waited for")
def commits_that_steps_do_not_wait_for() -> None:
    with mock.patch.object(SimulatedStream, "wait_event", return_value=None):
        commits()


@case
def copies_for_checkpoints() -> None:
    model, memory = net().to(first_device()), Memory()
    for _ in range(2):
        copy = copied({"model": model.state_dict(), "again": model[0].weight, "step": 3}, memory)
        assert copy["step"] == 3
        for key, tensor in copy["model"].items():
            assert tensor.device.type == "cpu"
            assert torch.equal(tensor, model.state_dict()[key].cpu())
        assert copy["again"].data_ptr() == copy["model"]["0.weight"].data_ptr()
    assert len(observed.pinned) == 1, observed.pinned


def with_two_devices() -> tuple[torch.nn.Module, torch.nn.Module]:
    lower, upper = net(), net()
    return lower.to(first_device()), upper.to(other_device())


@case
def a_model_on_two_devices() -> None:
    """The second example of docs/gpus.md, compared with one process on the rows of both ranks."""
    for op, dtype in ((hvd.Average, torch.float32), (hvd.Sum, torch.float32)):
        lower, upper = with_two_devices()
        params = [*lower.parameters(), *upper.parameters()]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=0.01, momentum=0.9), op=op, bucket_cap_mb=0.002)
        for step in range(5):
            observed.stepping = False
            batch = rows(hvd.rank(), step, dtype).to(first_device())
            observed.stepping = step >= 2
            optimizer.zero_grad()
            upper(lower(batch).to(other_device())).square().mean().backward()
            optimizer.step()
        observed.stepping = False
        ours = [param.detach().cpu() for param in params]
        lower, upper = net(), net()
        alone = [*lower.parameters(), *upper.parameters()]
        plain = torch.optim.SGD(alone, lr=0.01, momentum=0.9)
        share = 2 if op is hvd.Average else 1
        for step in range(5):
            plain.zero_grad()
            for rank in range(2):
                (upper(lower(rows(rank, step, dtype))).square().mean() / share).backward()
            plain.step()
        for mine_, theirs in zip(ours, alone, strict=True):
            torch.testing.assert_close(mine_, theirs.detach(), rtol=1e-4, atol=1e-5)
        buckets = {launch.communicator[1] for launch in nccl.launches if launch.what.startswith("all_reduce")}
        assert buckets == {0, 1}


class Held(torch.autograd.Function):
    """The identity, whose backward waits for an event."""

    @staticmethod
    def forward(context: Any, value: torch.Tensor, event: threading.Event) -> torch.Tensor:
        context.event = event
        return value.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        assert context.event.wait(20)
        return gradient, None


def two_branches(pause: float) -> None:
    """Autograd's threads of two GPUs reach the hooks at once: one while the other starts its all-reduce.

    Ranks have equal gradients and do not exchange them: without the lock they might wait for each other forever.

    Args:
        pause: Seconds that the first all-reduce leaves the other thread to enter.
    """
    first, second = torch.nn.Linear(WIDTH, 4).to(first_device()), torch.nn.Linear(WIDTH, 4).to(other_device())
    params = [*first.parameters(), *second.parameters()]
    first_is_there, again = threading.Event(), threading.Event()
    ready: list[int] = []
    started: list[int] = []

    def count(_: torch.Tensor) -> None:
        ready.append(1)
        if len(ready) == 2:
            first_is_there.set()

    for param in first.parameters():
        param.register_post_accumulate_grad_hook(count)  # type: ignore[no-untyped-call]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=0.1), op=hvd.Sum)  # its hooks run after that one

    def all_reduce(tensor: torch.Tensor, *args: Any, **options: Any) -> mock.Mock:
        started.append(tensor.get_device())
        if len(started) == 1:
            first_is_there.set()
            again.wait(pause)
        else:
            again.set()
        tensor.mul_(hvd.size())
        return mock.Mock()

    for step in range(3):
        for each in (first_is_there, again, ready, started):
            each.clear()
        optimizer.zero_grad()
        upper = Held.apply(second(torch.ones(1, WIDTH, device=other_device())), first_is_there).sum()
        loss = first(torch.ones(1, WIDTH, device=first_device())).sum() + upper.to(first_device())
        with mock.patch.object(dist, "all_reduce", all_reduce) if step else contextlib.nullcontext():
            loss.backward()
        if step:
            assert started == [first_device().index, other_device().index]
        for param in params:
            assert param.grad is not None
            assert param.grad.cpu().eq(hvd.size()).all()
        optimizer.step()


@case
def two_threads_of_autograd_in_the_hooks() -> None:
    two_branches(0.2)


@mutant("")
def hooks_without_a_lock() -> None:
    with mock.patch.object(hooks, "serialized", side_effect=lambda hook, lock: hook):
        two_branches(10)


@case
def parameters_that_ranks_divide_otherwise() -> None:
    lower, upper = with_two_devices()
    if hvd.rank() == 1:
        upper.to(first_device())
    with pytest.raises(PlanMismatchError, match="8 on device 0, then 8 on device 1"):
        hvd.DistributedOptimizer(torch.optim.SGD([*lower.parameters(), *upper.parameters()], lr=0.1))


def normalize(
    dtype: torch.dtype, shape: tuple[int, ...], split: tuple[int, int], memory: torch.memory_format, close: float
) -> None:
    """Compare with one process on the rows of both ranks, whose parts have these sizes."""
    device, (first, second) = first_device(), split
    mine = slice(0, first) if hvd.rank() == 0 else slice(first, first + second)
    layer = hvd.SyncBatchNorm(shape[0]).to(device)
    alone = torch.nn.BatchNorm3d(shape[0]).double()
    with torch.no_grad():
        for norm in (layer, alone):
            norm.weight.copy_(torch.arange(1.0, shape[0] + 1))
            norm.bias.copy_(torch.arange(shape[0]) - 2.0)
    for step in range(3):
        whole = torch.randn((first + second, *shape), generator=torch.Generator().manual_seed(step)) * 3 + 40
        whole[:, 0] = 7  # a channel without variance
        here = whole[mine].to(dtype).to(device, memory_format=memory).requires_grad_()
        before = len(observed.kernels)
        out = layer(here)
        (out.float() ** 3).sum().backward()
        ran = {name for name, *_ in observed.kernels[before:] if "batch_norm" in name}
        parts = ("stats", "elemt", "backward_reduce", "backward_elemt")
        assert ran == ({f"aten::batch_norm_{part}" for part in parts} if here.numel() else set()), ran
        exact = whole.to(dtype).double().requires_grad_()
        expected = alone(exact.view(first + second, shape[0], 1, 1, -1)).view(exact.shape)
        (expected**3).sum().backward()
        assert here.grad is not None
        assert exact.grad is not None
        assert out.dtype == here.grad.dtype == dtype
        torch.testing.assert_close(out.detach().cpu().double(), expected[mine].detach(), rtol=close, atol=close)
        unit = exact.grad.abs().max()  # large numbers nearly cancel out in sums
        torch.testing.assert_close(here.grad.cpu().double() / unit, exact.grad[mine] / unit, rtol=close, atol=close)
    for ours, theirs in ((layer.running_mean, alone.running_mean), (layer.running_var, alone.running_var)):
        assert ours is not None
        torch.testing.assert_close(ours.cpu().double(), theirs, rtol=1e-4, atol=1e-6)


@case
def batch_normalisation_over_ranks() -> None:
    normalize(torch.float32, (4,), (3, 3), torch.contiguous_format, 1e-4)
    normalize(torch.float32, (4, 2, 5), (2, 4), torch.channels_last, 1e-4)
    normalize(torch.float16, (4, 6), (4, 2), torch.contiguous_format, 3e-2)
    normalize(torch.bfloat16, (4, 2, 2, 3), (2, 2), torch.channels_last_3d, 2e-1)


@case
def batch_normalisation_of_no_rows() -> None:
    normalize(torch.float32, (4, 2, 5), (0, 4), torch.contiguous_format, 1e-4)


@case
def the_sum_of_names_on_two_devices_in_one_breath() -> None:
    for turn in range(3):
        handles = [
            hvd.allreduce_async(mine(device) * (k + 1), op=hvd.Sum, name=f"mixed {k}")
            for k, device in enumerate([first_device(), other_device()] * 2)
        ]
        for k, handle in enumerate(handles):
            check(handle.wait(), TOTAL * (k + 1))
        assert turn >= 0


@case
def steps_alone_and_outer_steps() -> None:
    none, fp16, int4 = hvd.Compression.none, hvd.Compression.fp16, hvd.Int4Compressor(16)
    for overlap, compression, fragments in ((0, none, 1), (1, none, 1), (0, fp16, 1), (1, int4, 2)):
        model = net().to(first_device())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        local = hvd.LocalSGD(model, optimizer, 2, overlap=overlap, compression=compression, fragments=fragments)
        for step in range(6):
            local.zero_grad()
            square(model, rows(hvd.rank(), step).to(first_device())).backward()  # type: ignore[no-untyped-call]
            local.step()
        local.synchronize()
        weights = torch.cat([param.detach().flatten() for param in model.parameters()])
        assert torch.equal(weights, hvd.broadcast(weights, root_rank=0, name="of the outer step"))
