"""Which GPUs ranks use, and how the ranks' GPUs fit together."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from spark_hvd.estimators.errors import ModelError
from spark_hvd.estimators.transform.models import memory_named
from spark_hvd.runner.rank import own_gpu
from spark_hvd.runner.rank.elastic import outlive_nccl
from spark_hvd.runner.rank.gpus import (
    Choice,
    GpuError,
    GpuShare,
    RankGpus,
    choose_backend,
    devices_of,
    gpu_env,
    ordinal_of,
    own_device,
)
from spark_hvd.runner.supervise.forkserver import has_started_cuda
from spark_hvd.transport.host.pages import PINNED_PIECE, in_pieces
from spark_hvd.transport.torch_private import HashStore
from spark_hvd.world.layout import WorldLayout


@pytest.mark.parametrize(
    ("assigned", "visible", "expected"),
    [
        (["3"], None, ("3",)),
        (["0", "1"], None, ("0", "1")),
        (["GPU-aa"], None, ("GPU-aa",)),
        (["3"], "3", ("3",)),  # as on Databricks: the task's own GPU, by its number
        (["1"], "0,1", ("1",)),  # entry and position agree
        (["2"], "1,2,3", ("2",)),  # an entry takes precedence over a position
        (["0"], "2,3", ("2",)),  # no entry: a position
        (["1", "0"], "GPU-aa,GPU-bb", ("GPU-bb", "GPU-aa")),
        (["GPU-aabbcc"], "GPU-xx, GPU-aabb", ("GPU-aabb",)),  # shortened
        (["GPU-aabbcc"], "0,1", ("GPU-aabbcc",)),  # cannot be compared
        (["3"], "GPU-b", ("3",)),
        (["MIG-7"], "MIG-7,MIG-8", ("MIG-7",)),
        ([], None, ()),
    ],
)
def test_addresses_and_the_executors_own_variable(
    assigned: list[str], visible: str | None, expected: tuple[str, ...]
) -> None:
    assert devices_of(assigned, 1, 0, visible, None) == expected


@pytest.mark.parametrize(("assigned", "visible"), [(["5"], "2,3"), (["0"], ""), (["GPU-a"], "GPU-b")])
def test_an_address_that_the_executor_may_not_use(assigned: list[str], visible: str) -> None:
    with pytest.raises(GpuError, match=f"assigned GPUs {assigned[0]}.*CUDA_VISIBLE_DEVICES='{visible}' does not"):
        devices_of(assigned, 1, 0, visible, None)


@pytest.mark.parametrize(
    ("assigned", "ranks", "each", "expected"),
    [
        ("0123", 2, None, [("0", "1"), ("2", "3")]),
        ("0123", 4, 1, [("0",), ("1",), ("2",), ("3",)]),
        ("0123", 2, 1, [("0",), ("1",)]),
        ("012", 2, None, [("0",), ("1",)]),
        ("0", 2, None, [("0",), ("0",)]),  # shared
        ("01", 4, None, [("0",), ("0",), ("1",), ("1",)]),
        ("01", 3, None, [("0",), ("0",), ("1",)]),
    ],
)
def test_the_ranks_of_a_task_divide_its_gpus(
    assigned: str, ranks: int, each: int | None, expected: list[tuple[str, ...]]
) -> None:
    assert [devices_of(list(assigned), ranks, index, None, each) for index in range(ranks)] == expected


def test_none_asked_for_none_assigned_and_too_few() -> None:
    assert devices_of(["0"], 1, 0, "0", 0) == ()
    assert devices_of(None, 1, 0, None, 0) == ()
    assert devices_of(None, 1, 0, "2,3", 1) is None
    with pytest.raises(
        GpuError, match=r"gpus_per_proc=2: 2 ranks of a task need 4 GPUs, but Spark assigned 3 \(0, 1, 2"
    ):
        devices_of(["0", "1", "2"], 2, 0, None, 2)


def test_the_current_device() -> None:
    assert own_device(3, 4, 2, GpuShare(("5", "6"))) == 0, "the assigned ones are all that it sees"
    assert own_device(0, 1, 0, GpuShare(("5",))) is None, "torch without CUDA"
    assert own_device(0, 1, 0, GpuShare(())) is None
    assert [own_device(rank, 4, 2, GpuShare()) for rank in range(4)] == [0, 1, 0, 1]
    assert [own_device(rank, 2, 4, GpuShare(per_proc=2)) for rank in range(2)] == [0, 2]
    assert own_device(0, 2, 0, GpuShare()) is None
    with pytest.raises(GpuError, match=r"gpus_per_proc=2: 2 ranks on this host need 4 GPUs, but torch sees 3\."):
        own_device(1, 2, 3, GpuShare(per_proc=2))


@pytest.mark.parametrize(
    ("address", "visible", "there", "expected"),
    [
        ("1", None, ["a", "b"], 1),
        ("3", "2,3", ["c", "d"], 1),
        ("1", "2,3", ["c", "d"], 1),
        ("GPU-d", None, ["c", "d"], 1),
        ("GPU-d", "2,3", ["c", "d"], 1),
        ("GPU-d", "GPU-c,GPU-d", ["c", "d"], 1),
        ("MIG-1", "MIG-1", ["c"], 0),
        ("3", None, ["a", "b"], 1),  # a container with some of the host's GPUs
    ],
)
def test_an_assigned_gpu_among_those_that_a_process_sees(
    address: str, visible: str | None, there: list[str], expected: int
) -> None:
    assert ordinal_of(address, visible, there) == expected


@pytest.mark.parametrize(("address", "visible"), [("GPU-x", None), ("GPU-x", "0,1")])
def test_an_assigned_gpu_that_a_process_does_not_see(address: str, visible: str | None) -> None:
    with pytest.raises(
        GpuError, match=f"Spark assigned GPU {address}, which is none of the 2 GPUs that torch sees here"
    ):
        ordinal_of(address, visible, ["a", "b"])


def ranks(*facts: tuple[str, str | None, str | None]) -> list[RankGpus]:
    return [RankGpus(host, None if address is None else (address,), board) for host, address, board in facts]


def test_one_gpu_each_leaves_the_choice_to_the_world() -> None:
    assert choose_backend(ranks(("a", "0", "x"), ("a", "1", "y"), ("b", "0", "x")), None, False) == Choice(None)
    assert choose_backend(ranks(("a", None, None), ("a", None, None)), None, False) == Choice(None), "no GPUs at all"
    # Containers on one host may use one number for different GPUs.
    assert choose_backend(ranks(("a", "0", "x"), ("a", "0", "y")), "nccl", False) == Choice("nccl")


@pytest.mark.parametrize("backend", [None, "gloo", "mpi", "nccl"])
@pytest.mark.parametrize("board", [None, "x"])
def test_one_gpu_handed_to_two_tasks_is_an_error(backend: str | None, board: str | None) -> None:
    with pytest.raises(GpuError, match="ranks 1 and 2 on host a were handed the same GPU 0 by Spark"):
        choose_backend(ranks(("b", "0", board), ("a", "0", board), ("a", "0", board)), backend, False)


def test_ranks_learn_which_gpus_the_others_have() -> None:
    kv, members = HashStore(), WorldLayout.from_hosts(["a", "a"]).ranks
    with ThreadPoolExecutor(2) as pool:
        same = [pool.submit(own_gpu.settle, me, GpuShare(("0",)), kv, None) for me in members]
    for each in same:
        with pytest.raises(GpuError, match="ranks 0 and 1 on host a were handed the same GPU 0 by Spark"):
            each.result()


def test_ranks_that_share_a_gpu_use_gloo_and_not_nccl() -> None:
    shared = ranks(("a", "0", "x"), ("a", "0", "x"))
    choice = choose_backend(shared, None, True)
    assert choice.backend == "gloo"
    assert choice.warning is not None
    assert "ranks 0 and 1 share a GPU of host a" in choice.warning
    assert choose_backend(shared, "mpi", True) == Choice("mpi")
    with pytest.raises(GpuError, match='backend="nccl": ranks 0 and 1 share a GPU of host a'):
        choose_backend(shared, "nccl", True)
    by_local_rank = ranks(("a", None, "x"), ("a", None, "y"), ("a", None, "x"))
    assert choose_backend(by_local_rank, None, False).backend == "gloo", "more ranks than GPUs"
    slices_of_one = ranks(("a", "MIG-1", "x"), ("a", "MIG-2", "x"))
    assert choose_backend(slices_of_one, None, False).backend == "gloo"


def test_a_rank_without_a_gpu() -> None:
    mixed = ranks(("a", None, "x"), ("b", None, None))
    choice = choose_backend(mixed, None, False)
    assert choice.backend == "gloo"
    assert choice.warning is not None
    assert "rank 1 on host b has no GPU" in choice.warning
    with pytest.raises(GpuError, match='backend="nccl": rank 1 on host b has no GPU that torch can use'):
        choose_backend(mixed, "nccl", False)


FORK_SERVER = """
import os, torch
asked = []
def started(*args, **kwargs):
    asked.append(1)
torch.cuda._lazy_init = started
from spark_hvd.runner.supervise.forkserver import _preload
_preload()
assert os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"
assert not torch.cuda.is_initialized()
print(len(asked))
"""


@pytest.mark.slow
def test_the_fork_server_does_not_start_cuda() -> None:
    done = subprocess.run([sys.executable, "-c", FORK_SERVER], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["0"]


def test_ranks_count_gpus_as_spark_does() -> None:
    """nvidia-smi orders by bus, and CUDA by speed by default: on hosts with two kinds of GPUs they differ."""
    growth = {"TF_FORCE_GPU_ALLOW_GROWTH": "true"}
    by_bus = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert gpu_env(("2", "3"), {}) == growth | by_bus | {"CUDA_VISIBLE_DEVICES": "2,3"}
    assert gpu_env(("GPU-aa",), {}) == growth | {"CUDA_VISIBLE_DEVICES": "GPU-aa"}
    assert gpu_env((), {}) == growth | {"CUDA_VISIBLE_DEVICES": ""}
    assert gpu_env(None, {}) == growth
    # The executor's own choice stands, with its own numbering.
    assert gpu_env(("2",), {"CUDA_VISIBLE_DEVICES": "2,3"}) == growth | {"CUDA_VISIBLE_DEVICES": "2"}
    chosen = {"CUDA_DEVICE_ORDER": "FASTEST_FIRST", "TF_FORCE_GPU_ALLOW_GROWTH": "false"}
    assert gpu_env(("2",), chosen) == {"CUDA_VISIBLE_DEVICES": "2"}


def test_elastic_ranks_outlive_nccls_errors() -> None:
    env: dict[str, str] = {}
    outlive_nccl(env)
    assert env == {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2"}
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"):
        env = {name: "3"}
        outlive_nccl(env)
        assert env == {name: "3"}


def test_cuda_that_was_started_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "0").symlink_to("/dev/null")
    (tmp_path / "1").symlink_to("/dev/nvidiactl")  # belongs to NVML
    assert not has_started_cuda(str(tmp_path))
    (tmp_path / "2").symlink_to("/dev/nvidia-uvm")
    assert has_started_cuda(str(tmp_path))
    assert not has_started_cuda()


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB"), RuntimeError("CUDA out of memory.")],
)
def test_a_model_too_large_for_a_gpu(error: Exception) -> None:
    with (
        pytest.raises(ModelError, match="the model does not fit into the memory of the GPU") as caught,
        memory_named("the model"),
    ):
        raise error
    assert "memoryOverhead" not in str(caught.value)
    assert "spark.task.resource.gpu.amount" in str(caught.value)


def test_pinned_memory_is_not_rounded_up_to_twice_as_much() -> None:
    """torch rounds each allocation up to a power of two: 9 GB in one piece would take 16."""
    layer = [4096 * 4096 * 4, 4096 * 4]
    sizes = layer * 134  # 9 GB
    pieces = in_pieces(sizes)
    assert [end - start for piece in pieces for start, end in piece] == sizes
    assert all(start % 64 == 0 for piece in pieces for start, _ in piece)
    assert all(before[1] <= after[0] for piece in pieces for before, after in pairwise(piece))
    assert all(piece[-1][1] <= PINNED_PIECE for piece in pieces)
    assert sum(1 << (piece[-1][1] - 1).bit_length() for piece in pieces) < 1.15 * sum(sizes)
    assert in_pieces([]) == []
    assert in_pieces([0, 5, 0]) == [[(0, 0), (0, 5), (64, 64)]]
    assert in_pieces([30, 3 * PINNED_PIECE, 40]) == [[(0, 30)], [(0, 3 * PINNED_PIECE)], [(0, 40)]]
