"""Training on a GPU: DistributedOptimizer with mixed precision, an estimator's loop, transform."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import cloudpickle
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import spark_hvd.torch as hvd
from spark_hvd import run_local
from spark_hvd.data.readers.dataset import Column
from spark_hvd.estimators import LocalBackend, TorchModel
from spark_hvd.estimators.training.head import Head
from spark_hvd.estimators.training.inputs import TensorSpec
from spark_hvd.estimators.transform.declared import declared_outputs
from spark_hvd.estimators.transform.feeds import TensorFeed
from spark_hvd.estimators.transform.models import ModelSource
from spark_hvd.estimators.transform.predict import Prediction, predictions
from tests.gpu.conftest import ONE_DEVICE
from tests.spark.estimator_support import estimator, frame, numbers

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def model_on(device: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)).to(device)


def mixed_precision(device: str, overflow_at: int) -> tuple[list[float], list[float], torch.Tensor]:
    """Return losses, the scaler's scales and the final weights; rank 1's loss overflows in one step."""
    model = model_on(device)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    scaler = torch.amp.GradScaler(device, init_scale=256.0)
    torch.manual_seed(hvd.rank())
    features = torch.randn(64, 8, device=device)
    values = features.sum(1, keepdim=True)
    losses, scales = [], []
    for step in range(10):
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.float16 if device == "cuda" else torch.bfloat16):
            loss = torch.nn.functional.mse_loss(model(features), values)
        if step == overflow_at and hvd.rank() == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss.detach()))
        scales.append(scaler.get_scale())
    return losses, scales, torch.cat([p.detach().flatten().cpu() for p in model.parameters()])


def test_distributed_optimizer_with_mixed_precision(device: str) -> None:
    first, second = run_local(mixed_precision, (device, 4), num_proc=2, env=ONE_DEVICE)
    torch.testing.assert_close(first[2], second[2], rtol=0, atol=0)
    assert torch.isfinite(first[2]).all()
    assert first[1] == second[1], "an overflow on one rank is one on all"
    assert first[1][3] == 256.0
    assert first[1][4] == 128.0
    assert first[0][-1] < first[0][0] / 2


def one_process(device: str) -> torch.Tensor:
    model = model_on(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    if hvd.size() > 1:
        optimizer = hvd.DistributedOptimizer(optimizer)
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(32, 8, generator=generator).to(device)
    share = features.chunk(hvd.size())[hvd.rank()]
    for _ in range(5):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(share), share.sum(1, keepdim=True)).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten().cpu() for p in model.parameters()])


def test_two_ranks_train_as_one_process_does(device: str) -> None:
    (alone,) = run_local(one_process, (device,), num_proc=1)
    for weights in run_local(one_process, (device,), num_proc=2, env=ONE_DEVICE):
        torch.testing.assert_close(weights, alone, rtol=1e-4, atol=1e-5)


class OnGpu(torch.nn.Module):
    """Returns 1 on a GPU, else 0."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.linear(features) * 0 + float(features.is_cuda)


def test_an_estimators_loop_on_parquet(tmp_path: Path, device: str) -> None:
    # Without a session, for machines that have a GPU and no Java.
    features, value, _ = numbers()
    path = str(tmp_path / "rows.parquet")
    pq.write_table(pa.table({"features": features.tolist(), "value": value}), path)
    histories, weights = [], []
    for where in {device, "cpu"}:
        backend = LocalBackend(2, verbose=0, env=ONE_DEVICE)
        fit = estimator(num_proc=None, backend=backend, use_gpu=where == "cuda", epochs=3, store=str(tmp_path / where))
        fitted = fit.fit_on_parquet(path)
        histories.append([row["loss"] for row in fitted.getHistory()])
        weights.append(fitted.getModel().state_dict())
        assert all(not tensor.is_cuda for tensor in weights[-1].values())
    assert histories[0][-1] < histories[0][0]
    np.testing.assert_allclose(histories[0], histories[-1], rtol=1e-4)
    torch.testing.assert_close(weights[0], weights[-1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("use_gpu", [True, False])
def test_predictions_are_made_on_the_device(device: str, use_gpu: bool) -> None:
    column = Column("features", "float32", (3,))
    job = Prediction(
        model=ModelSource("made here", loader=OnGpu),
        feed=TensorFeed((TensorSpec(column),), {}),
        plan=declared_outputs("array<float>"),
        outputs=None,
        head=Head("other"),
        batch_size=16,
        use_gpu=use_gpu,
    )
    rows = pa.array(numbers()[0].tolist(), pa.list_(pa.float32()))
    (result,) = predictions(job, iter([pa.StructArray.from_arrays([rows], names=["features"])]))
    assert len(result) == len(rows)
    assert {value for row in result.field(0).to_pylist() for value in row} == {float(use_gpu and device == "cuda")}


def test_an_estimators_loop_and_transform(spark: SparkSession, device: str) -> None:
    # The trial of a batch runs on the driver's CPU, the loop where use_gpu says.
    df = frame(spark)
    backend = LocalBackend(2, verbose=0, env=ONE_DEVICE)
    fitted = estimator(num_proc=None, backend=backend, use_gpu=device == "cuda", epochs=3).fit(df)
    losses = [row["loss"] for row in fitted.getHistory()]
    assert losses[-1] < losses[0]
    on_cpu = fitted.copy()
    on_cpu.setParams(use_gpu=False)
    fitted.setParams(use_gpu=device == "cuda")
    here, there = (
        np.array([row["value__output"] for row in model.transform(df).orderBy("row").collect()], dtype="float64")
        for model in (fitted, on_cpu)
    )
    np.testing.assert_allclose(here, there, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("use_gpu", [True, False])
def test_transform_runs_on_the_device(spark: SparkSession, device: str, use_gpu: bool) -> None:
    model = TorchModel(model=OnGpu(), feature_columns=["features"], label_columns=["value"], use_gpu=use_gpu)
    values = {row["value__output"] for row in model.transform(frame(spark)).collect()}
    assert values == {float(use_gpu and device == "cuda")}
