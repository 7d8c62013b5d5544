"""Every public name of horovod.torch exists here, and takes the same arguments in the same positions."""

from __future__ import annotations

import inspect

import pytest

import spark_hvd
import spark_hvd.torch as hvd

REDUCE = ["tensor", "average", "name", "op", "prescale_factor", "postscale_factor", "process_set"]
COMPRESSED = ["tensor", "average", "name", "compression", "op", "prescale_factor", "postscale_factor", "process_set"]
SCATTER = ["tensor", "name", "op", "process_set", "prescale_factor", "postscale_factor"]
GATHER = ["tensor", "name", "process_set"]
BROADCAST = ["tensor", "root_rank", "name", "process_set"]
ALLTOALL = ["tensor", "splits", "name", "process_set"]


def grouped(arguments: list[str]) -> list[str]:
    return ["tensors", *arguments[1:]]


ARGUMENTS = {
    "init": ["comm", "process_sets"],
    "shutdown": [],
    "is_initialized": [],
    "start_timeline": ["file_path", "mark_cycles"],
    "stop_timeline": [],
    "size": [],
    "local_size": [],
    "cross_size": [],
    "rank": [],
    "local_rank": [],
    "cross_rank": [],
    "mpi_threads_supported": [],
    "mpi_enabled": [],
    "mpi_built": [],
    "gloo_enabled": [],
    "gloo_built": [],
    "nccl_built": [],
    "ddl_built": [],
    "ccl_built": [],
    "cuda_built": [],
    "rocm_built": [],
    "allreduce": COMPRESSED,
    "allreduce_": REDUCE,
    "allreduce_async": REDUCE,
    "allreduce_async_": REDUCE,
    "grouped_allreduce": grouped(COMPRESSED),
    "grouped_allreduce_": grouped(REDUCE),
    "grouped_allreduce_async": grouped(REDUCE),
    "grouped_allreduce_async_": grouped(REDUCE),
    "sparse_allreduce_async": ["tensor", "name", "op", "process_set"],
    "allgather": GATHER,
    "allgather_async": GATHER,
    "grouped_allgather": grouped(GATHER),
    "grouped_allgather_async": grouped(GATHER),
    "broadcast": BROADCAST,
    "broadcast_": BROADCAST,
    "broadcast_async": BROADCAST,
    "broadcast_async_": BROADCAST,
    "alltoall": ALLTOALL,
    "alltoall_async": ALLTOALL,
    "reducescatter": ["tensor", "name", "compression", *SCATTER[2:]],
    "reducescatter_async": SCATTER,
    "grouped_reducescatter": ["tensors", "name", "compression", *SCATTER[2:]],
    "grouped_reducescatter_async": grouped(SCATTER),
    "join": ["device"],
    "barrier": ["process_set"],
    "poll": ["handle"],
    "synchronize": ["handle"],
    "ProcessSet": ["ranks_or_comm"],
    "add_process_set": ["process_set"],
    "remove_process_set": ["process_set"],
    "DistributedOptimizer": [
        *("optimizer", "named_parameters", "compression", "backward_passes_per_step", "op"),
        *("gradient_predivide_factor", "num_groups", "groups", "sparse_as_dense", "process_set"),
    ],
    "broadcast_parameters": ["params", "root_rank"],
    "broadcast_optimizer_state": ["optimizer", "root_rank", "model"],
    "broadcast_object": ["obj", "root_rank", "name", "process_set"],
    "allgather_object": ["obj", "name"],
    "SyncBatchNorm": ["num_features", "eps", "momentum", "affine", "track_running_stats"],
}
OTHERS = [
    *("Average", "Sum", "Adasum", "Min", "Max", "Product"),
    *("Compression", "HorovodInternalError", "global_process_set"),
]


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments(name: str) -> None:
    ours = list(inspect.signature(getattr(hvd, name)).parameters)
    assert ours[: len(ARGUMENTS[name])] == ARGUMENTS[name]


def test_names() -> None:
    assert {*ARGUMENTS, *OTHERS} <= set(hvd.__all__)
    assert all(hasattr(hvd, name) for name in hvd.__all__)


ELASTIC = {
    "run": ["func"],
    "TorchState": ["model", "optimizer"],
    "ElasticSampler": ["dataset", "shuffle", "seed"],
    "ElasticSampler.set_epoch": ["self", "epoch"],
    "ElasticSampler.record_batch": ["self", "batch_idx", "batch_size"],
    "ElasticSampler.state_dict": ["self"],
    "ElasticSampler.load_state_dict": ["self", "state_dict"],
    "State.register_reset_callbacks": ["self", "callbacks"],
    **{f"State.{name}": ["self"] for name in ("commit", "check_host_updates", "on_reset", "reset")},
    **{f"ObjectState.{name}": ["self"] for name in ("save", "restore", "sync")},
}


@pytest.mark.parametrize("name", ELASTIC)
def test_elastic_arguments(name: str) -> None:
    found: object = hvd.elastic
    for part in name.split("."):
        found = getattr(found, part)
    assert callable(found)
    assert list(inspect.signature(found).parameters)[: len(ELASTIC[name])] == ELASTIC[name]


RUN_ELASTIC = ["fn", "args", "kwargs", "num_proc", "min_num_proc", "max_num_proc"]
FURTHER = {
    *("start_timeout", "elastic_timeout", "reset_limit", "env", "verbose"),
    *("timeout", "backend", "cooldown_range"),
}


def test_run_elastic_arguments() -> None:
    parameters = list(inspect.signature(spark_hvd.run_elastic).parameters)
    assert parameters[: len(RUN_ELASTIC)] == RUN_ELASTIC
    assert set(parameters) > FURTHER
