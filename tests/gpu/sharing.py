"""Two ranks of `run_local` that share a GPU: CUDA stays out of the fork server; join; vitals."""

from __future__ import annotations

import os
import sys

import cloudpickle
import torch

import spark_hvd.torch as hvd
from spark_hvd import run_local
from spark_hvd.context.observe import observe
from spark_hvd.runner.supervise.forkserver import has_started_cuda
from tests.gpu.conftest import DEVICE, ONE_DEVICE

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def rank(device: str) -> dict[str, object]:
    """Return what a rank sees."""
    tensor = torch.ones(1000, device=device)
    total = float(hvd.allreduce(tensor * (hvd.rank() + 1), op=hvd.Sum, name="both").sum())
    if hvd.rank() == 0:
        assert float(hvd.allreduce(tensor, op=hvd.Sum, name="alone").sum()) == 1000.0
    hvd.join()
    vitals = observe()
    assert vitals is not None
    return {
        "sum": total,
        "the fork server has started CUDA": has_started_cuda(f"/proc/{os.getppid()}/fd"),
        "has started CUDA": has_started_cuda(),
        "GPU memory of the vitals": vitals.gpu_memory_bytes,
        "GPU utilization of the vitals": vitals.gpu_utilization,
    }


if __name__ == "__main__":
    for seen in run_local(rank, (DEVICE,), num_proc=2, verbose=0, env=ONE_DEVICE):
        print(seen)
        assert seen["sum"] == 3000.0
        assert not seen["the fork server has started CUDA"]
        assert seen["has started CUDA"] == (DEVICE == "cuda")
        assert bool(seen["GPU memory of the vitals"]) == (DEVICE == "cuda")
