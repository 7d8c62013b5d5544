"""Collectives on GPU tensors: over NCCL in a world of one, over Gloo and MPI between two ranks that share a device."""

from __future__ import annotations

import io
import os
import signal
import sys
import time
from importlib.util import find_spec

import cloudpickle
import pytest
import torch
import torch.distributed as dist

import spark_hvd.torch as hvd
from spark_hvd import run_local
from spark_hvd.runner import RankFailedError, Reporting
from spark_hvd.torch.sync_batch_norm import SyncBatchNorm
from tests.gpu.conftest import ONE_DEVICE

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SHARING = [
    pytest.param(None, id="gloo"),
    pytest.param(
        "mpi",
        marks=pytest.mark.skipif(find_spec("mpi4py") is None, reason="there is no MPI (pip install mpich mpi4py)"),
    ),
]


def in_one_world(device: str) -> list[float]:
    on_gpu, on_cpu = torch.ones(4, device=device), torch.ones(4)
    dist.all_reduce(on_gpu)
    dist.all_reduce(on_cpu)
    gathered = torch.empty(dist.get_world_size() * 4, device=device)
    dist.all_gather_into_tensor(gathered, on_gpu)
    if device == "cuda":
        assert "cuda:nccl" in str(dist.get_backend_config())
        assert torch.cuda.current_device() == hvd.local_rank()
    return [float(on_gpu.sum()), float(on_cpu.sum()), float(gathered.sum())]


def test_nccl_in_a_world_of_one(device: str) -> None:
    assert run_local(in_one_world, (device,), num_proc=1) == [[4.0, 4.0, 4.0]]


def test_nccl_between_two_gpus(two_devices: str) -> None:
    assert run_local(in_one_world, (two_devices,), num_proc=2) == [[8.0, 8.0, 16.0]] * 2


def everything(device: str) -> None:
    """Call every collective by name, on float and integer tensors."""
    rank, size = hvd.rank(), hvd.size()
    for dtype in (torch.float32, torch.float16, torch.int64):
        mine = torch.arange(6, device=device).to(dtype) + rank
        total = sum(torch.arange(6) + other for other in range(size)).to(dtype)
        summed = hvd.allreduce(mine, op=hvd.Sum, name="sum")
        assert summed.device == mine.device
        torch.testing.assert_close(summed.cpu(), total)
        torch.testing.assert_close(
            hvd.allreduce(mine, op=hvd.Max, name="max").cpu(), torch.arange(6).to(dtype) + size - 1
        )
        gathered = hvd.allgather(mine[: 2 + rank], name="gather")
        assert gathered.shape == (sum(2 + other for other in range(size)),)
        torch.testing.assert_close(
            hvd.broadcast(mine, size - 1, name="cast").cpu(), torch.arange(6).to(dtype) + size - 1
        )
        shares = hvd.reducescatter(mine, op=hvd.Sum, name="share")
        torch.testing.assert_close(shares.cpu(), total.chunk(size)[rank])
        if 6 % size == 0:
            swapped, received = hvd.alltoall(mine, splits=torch.full((size,), 6 // size), name="swap")
            assert received.tolist() == [6 // size] * size
            assert swapped.shape == (6,)
    hvd.barrier()


@pytest.mark.parametrize("backend", SHARING)
def test_two_ranks_on_one_device(device: str, backend: str | None) -> None:
    errors = io.StringIO()
    run_local(everything, (device,), num_proc=2, backend=backend, env=ONE_DEVICE, reporting=Reporting(stderr=errors))
    shared = "ranks 0 and 1 share a GPU" in errors.getvalue()
    assert shared == (device == "cuda" and backend is None), errors.getvalue()


def test_nccl_is_refused_for_two_ranks_on_one_device(device: str) -> None:
    why = "share a GPU" if device == "cuda" else "has no GPU that torch can use"
    with pytest.raises(RankFailedError, match=rf'backend="nccl": .*{why}'):
        run_local(hvd.rank, num_proc=2, backend="nccl", env=ONE_DEVICE, verbose=0)


def on_streams(device: str) -> None:
    """The results wait for what was queued before the call, and later work waits for the results."""
    streams = [torch.cuda.Stream() for _ in range(2)] if device == "cuda" else [None, None]
    weights = torch.eye(512, device=device) * 2
    for step in range(3):
        handles = []
        for number in range(12):
            with torch.cuda.stream(streams[number % 2]):
                tensor = torch.full((512, 512), float(hvd.rank() + number), device=device)
                for _ in range(8):  # keep the stream busy during the call
                    tensor = tensor @ weights / 2
                handles.append(hvd.allreduce_async(tensor, op=hvd.Sum, name=f"step.{number}"))
                del tensor  # its memory must not be reused too soon
        large = hvd.allreduce_async_(torch.full((1 << 20,), step + 1.0, device=device), op=hvd.Sum, name="large")
        for number, handle in enumerate(handles):
            expected = sum(rank + number for rank in range(hvd.size()))
            assert torch.all(handle.wait() == expected), (step, number)
        assert torch.all(large.wait() == (step + 1.0) * hvd.size())


@pytest.mark.parametrize("backend", SHARING)
def test_named_collectives_and_streams(device: str, backend: str | None) -> None:
    run_local(on_streams, (device,), num_proc=2, backend=backend, env=ONE_DEVICE)


def normalizes(device: str) -> None:
    """Run torch's own kernels on a GPU, and compare with BatchNorm in float64."""
    rows = torch.split(torch.arange(6), [4, 2])[hvd.rank()]
    formats = (torch.contiguous_format, torch.channels_last)
    for dtype, close in ((torch.float64, 1e-7), (torch.float32, 1e-4), (torch.float16, 3e-2), (torch.bfloat16, 2e-1)):
        torch.manual_seed(0)
        whole = (torch.randn(6, 4, 5, 5) + 3).to(dtype).double()
        theirs, ours = torch.nn.BatchNorm2d(4).double(), SyncBatchNorm(4)
        ours = (ours.double() if dtype is torch.float64 else ours).to(device)
        part = whole[rows].to(dtype).to(device, memory_format=formats[hvd.rank()]).requires_grad_()
        whole.requires_grad_()
        expected, output = theirs(whole), ours(part)
        (expected**3).sum().backward()
        (output.to(theirs.weight.dtype) ** 3).sum().backward()
        assert whole.grad is not None
        assert part.grad is not None
        for mine, other in (
            (output.detach(), expected.detach()[rows]),
            (part.grad, whole.grad[rows]),
            (ours.running_mean, theirs.running_mean),
            (ours.running_var, theirs.running_var),
        ):
            torch.testing.assert_close(mine.cpu().double(), other, rtol=close, atol=close)


def test_sync_batch_norm(device: str) -> None:
    run_local(normalizes, (device,), num_proc=2, env=ONE_DEVICE)


def until_a_peer_dies(device: str) -> str:
    for _ in range(3):
        hvd.allreduce(torch.ones(1000, device=device), name="x")
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            dist.all_reduce(value := torch.ones(1000, device=device))
            float(value.sum())  # waits for the device
    except (RuntimeError, hvd.CollectiveError) as error:
        return str(error)


def test_a_rank_that_dies_ends_the_kernels_of_the_others(two_devices: str) -> None:
    started = time.monotonic()
    with pytest.raises(RankFailedError, match=r"rank 1 of 2 failed .*SIGKILL"):
        run_local(until_a_peer_dies, (two_devices,), num_proc=2, verbose=0)
    assert time.monotonic() - started < 60
