"""What surrounds training, on simulated devices: GPUs of ranks and tasks, facts, traces, checkpoints, aborts."""

from __future__ import annotations

import json
import logging
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import spark_hvd.torch as hvd
from spark_hvd import checkpoint
from spark_hvd.elastic.skeleton import Receivers, TensorTable
from spark_hvd.estimators.training.inputs import stacked
from spark_hvd.estimators.training.spec import TrainSpec
from spark_hvd.estimators.transform import models
from spark_hvd.estimators.transform.feeds import _moved
from spark_hvd.estimators.transform.predict import _resources
from spark_hvd.horovod import util
from spark_hvd.runner.rank import own_gpu
from spark_hvd.runner.rank.gpus import GpuError, GpuShare
from spark_hvd.transport import nccl as groups_of_nccl
from spark_hvd.transport.exchange import exchange
from spark_hvd.transport.torch_private import HashStore
from spark_hvd.world.layout import RankInfo
from tests.gpu_sim.device import DEVICES, observed
from tests.gpu_sim.named import TOTAL, check, mine, other_device
from tests.gpu_sim.rank import case, first_device
from tests.gpu_sim.steps import net, rows, square

ALONE = RankInfo(0, 1, 0, 1, 0, 1, "h")


@case
def a_ranks_own_device() -> None:
    """If Spark has assigned GPUs, the first is the rank's; otherwise its local rank decides."""
    assert own_gpu.take(ALONE, GpuShare(("GPU-a", "GPU-b"))) == "0:0:0"
    assert torch.cuda.current_device() == 0, "all that it sees are its own"
    assert own_gpu.settle(RankInfo(0, 1, 3, 4, 0, 1, "h"), GpuShare(), HashStore(), "gloo") == "gloo"
    assert torch.cuda.current_device() == 3
    assert own_gpu.take(RankInfo(0, 1, 1, 2, 0, 1, "h"), GpuShare(per_proc=2)) == "0:2:0"
    assert own_gpu.settle(ALONE, GpuShare(("GPU-a",)), HashStore(), "nccl") == "nccl"


@case
def a_ranks_device_that_torch_cannot_use() -> None:
    said: list[logging.LogRecord] = []
    handler = mock.Mock(level=0, handle=said.append)
    own_gpu._log.addHandler(handler)
    try:
        with mock.patch.object(torch.cuda, "device_count", return_value=0):
            assert own_gpu.take(ALONE, GpuShare(("MIG-a",), per_proc=1)) is None
            with pytest.raises(GpuError, match=r"rank 0 on host .* has no GPU that torch can use"):
                own_gpu.settle(ALONE, GpuShare(("MIG-a",)), HashStore(), "nccl")
    finally:
        own_gpu._log.removeHandler(handler)
    assert "has GPU MIG-a" in said[0].getMessage()


@case
def devices_of_estimators() -> None:
    spec = SimpleNamespace(use_gpu=True)
    assert TrainSpec.device.fget(spec) == first_device()
    gpu = {"gpu": SimpleNamespace(addresses=["3"])}
    task = mock.Mock(cpus=lambda: 2, resources=lambda: gpu, partitionId=lambda: DEVICES + 1)
    with mock.patch("pyspark.TaskContext.get", return_value=task):
        assert _resources(True) == (2, torch.device("cuda", 3))
        gpu.clear()
        assert _resources(True) == (2, torch.device("cuda", 1)), "by its partition"
    folder = mock.patch.object(models, "_folder", return_value=Path("/nowhere"))
    with folder, mock.patch.object(models, "_loaded_alone", return_value=net()):
        source = models.ModelSource("of a loader", loader=net)
        model = models.model_of(source, other_device())
    assert {param.device for param in model.parameters()} == {other_device()}
    assert torch.cuda.current_device() == other_device().index


@case
def batches_of_estimators_on_their_way() -> None:
    """With memory that is not pinned, the host would wait until the stream reaches the copy."""
    batch = torch.arange(12.0).view(3, 4)
    with observed.steps():
        (given,) = stacked([], [batch], first_device())
        moved = _moved({"rows": [batch]}, first_device())
    for tensor in (given, moved["rows"][0]):
        assert tensor.device == first_device()
        assert torch.equal(tensor.cpu(), batch)
    assert stacked([], [batch])[0] is batch


@case
def facts_over_nccl_alone() -> None:
    """A user's group that has no CPU backend."""
    for fact in ("short", "long" * 100):
        everyone = exchange([hvd.rank(), fact], dist.group.WORLD, first_device())
        assert everyone == [[0, fact], [1, fact]]


@case
def tensors_of_another_ranks_state() -> None:
    """They are created on this rank's current device, whatever the sender's is."""
    receivers = Receivers()
    receivers.prepare(TensorTable().flatten({"weights": mine(other_device())}))
    (made,) = receivers.in_order()
    assert made.device == first_device()


@case
def saved_in_the_background() -> None:
    with tempfile.TemporaryDirectory() as folder:
        weights = mine(first_device())
        handle = checkpoint.save(folder, {"weights": weights}, step=1, wait=False)
        weights.zero_()
        handle.wait()
        found = checkpoint.load(folder)
        if hvd.rank() == 0:  # which wrote it
            assert found is not None
            assert found.state["weights"].eq(1).all()


@case
def a_timeline() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        hvd.start_timeline(str(path))
        model = net().to(first_device())
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(2):
            optimizer.zero_grad()
            square(model, rows(hvd.rank(), step).to(first_device())).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        check(hvd.allreduce(mine(first_device()), op=hvd.Sum, name="traced"), TOTAL)
        hvd.stop_timeline()
        if hvd.rank() == 0:
            phases = {event.get("name") for event in json.loads(path.read_text())}
            assert "NCCL_ALLREDUCE" in phases, phases


class Backend:
    """Like ProcessGroupNCCL, but only its end."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def _group_start(self) -> None:
        self.told.append("start")

    def _group_end(self) -> None:
        self.told.append("end")

    def abort(self) -> None:
        self.told.append("abort")


@case
def kernels_are_ended_together() -> None:
    backend = Backend()
    with (
        mock.patch.object(groups_of_nccl, "carries", return_value=True),
        mock.patch.object(groups_of_nccl, "cuda_backend", return_value=backend),
    ):
        groups_of_nccl.NcclGroups(lambda: [dist.group.WORLD, None]).abort()
    assert backend.told == ["start", "abort", "end"]
    assert groups_of_nccl.NcclGroups(lambda: [dist.group.WORLD]).backends == []


@case
def what_there_is() -> None:
    with (
        mock.patch.object(dist, "is_nccl_available", return_value=True),
        mock.patch.object(torch.version, "cuda", "12.8"),
        mock.patch.object(torch.cuda, "nccl", SimpleNamespace(version=lambda: (2, 27, 5))),
    ):
        assert hvd.nccl_built() == 22705
        assert util.gpu_available("torch")
        assert util.get_available_devices() == [str(number) for number in range(DEVICES)]
    with pytest.raises(TypeError, match="a tensor on device meta cannot be sent; move it to the CPU or a CUDA device"):
        hvd.allreduce(torch.empty(2, device="meta"))
