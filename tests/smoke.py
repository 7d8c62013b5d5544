"""Uses every feature once, as a user does. tests/matrix.py runs this on each combination of versions.

The default tests, whose names begin with ``test_``, exclude it, because those cover far more.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import pyarrow as pa
import pytest
import torch
from torch import nn

import spark_hvd
from spark_hvd.estimators import TorchEstimator, TorchModel
from spark_hvd.runner import Level, RankFailedError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.timeout(600)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # executors cannot import tests
MINE = {"num_proc": 2, "verbose": 0}


def train(fails: int | None = None) -> tuple[int, int, float]:
    """Make three steps of a linear layer. Return the rank, the size and a sum over all ranks."""
    import spark_hvd.torch as hvd

    if hvd.rank() == fails:
        raise ValueError("bad batch")
    model = nn.Linear(4, 1)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    weights = hvd.allgather(model.weight.detach())
    assert torch.equal(weights[:1], weights[-1:])
    return hvd.rank(), hvd.size(), float(hvd.allreduce(torch.tensor(1.0), op=hvd.Sum))


def train_elastic(steps: int) -> tuple[int, int, int]:
    """Make steps that survive the loss of rank 1, which kills itself in the first world after some of them."""
    import spark_hvd.torch as hvd

    model = nn.Linear(4, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)

    @hvd.elastic.run
    def loop(state: Any) -> None:
        while state.step < steps:
            if state.step == 3 and hvd.rank() == 1 and hvd.generation() == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            state.step += 1
            state.commit()

    loop(state)
    return state.step, hvd.size(), hvd.generation()


def count_rows() -> int:
    import spark_hvd.torch as hvd

    return sum(len(batch["id"]) for batch in hvd.get_dataset_shard("train").torch_batches(4))


def keep(folder: str) -> tuple[int, list[float]]:
    """Write and read a checkpoint of plain state, and one of an FSDP2 model."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import spark_hvd.torch as hvd

    hvd.checkpoint.save(f"{folder}/plain", {"x": torch.arange(3.0)}, step=7)
    plain = hvd.checkpoint.load(f"{folder}/plain")
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (hvd.size(),)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    hvd.checkpoint.save_sharded(f"{folder}/sharded", model, optimizer, {"epoch": 1}, step=1)
    sharded = hvd.checkpoint.load_sharded(f"{folder}/sharded", model, optimizer)
    assert plain is not None
    assert sharded is not None
    assert sharded.state == {"epoch": 1}
    return plain.step, plain.state["x"].tolist()


@pytest.fixture(scope="module")
def df(spark: SparkSession) -> DataFrame:
    rows = [([i % 7 / 7, i % 5 / 5], i % 7 / 7 + i % 5 / 5) for i in range(120)]
    return spark.createDataFrame(rows, "features array<float>, value float").coalesce(1)


def fitted(estimator: Any, loads: Any, df: DataFrame, folder: Path) -> None:
    model = estimator.fit(df)
    before = [row[-1] for row in model.transform(df).collect()]
    assert len(before) == 120
    model.write().save(str(folder / "model"))
    after = [row[-1] for row in loads.load(str(folder / "model")).transform(df).collect()]
    assert after == pytest.approx(before)


def settings(**changed: Any) -> dict[str, Any]:
    common = {"feature_cols": ["features"], "label_cols": ["value"], "batch_size": 16, "epochs": 2, "validation": 0.2}
    return {**common, "num_proc": 2, "verbose": 0, **changed}


def torch_estimator(**changed: Any) -> TorchEstimator:
    optimizer = {"optimizer": lambda params: torch.optim.SGD(params, lr=0.05)}
    return TorchEstimator(model=nn.Linear(2, 1), loss=nn.MSELoss(), **settings(**optimizer, **changed))


def test_run(spark: SparkSession) -> None:
    assert spark_hvd.run(train, spark=spark, **MINE) == [(0, 2, 2.0), (1, 2, 2.0)]


def test_run_on_every_slot(spark: SparkSession) -> None:
    assert spark_hvd.run(train, spark=spark, verbose=0) == [(0, 2, 2.0), (1, 2, 2.0)]


def test_a_failing_rank(spark: SparkSession) -> None:
    with pytest.raises(RankFailedError, match="bad batch") as caught:
        spark_hvd.run(train, args=[1], spark=spark, **MINE)
    assert 'raise ValueError("bad batch")' in str(caught.value)


def test_data_without_rows(spark: SparkSession) -> None:
    nothing = spark.range(10).where("id < 0").repartition(2)
    with pytest.raises((spark_hvd.DataError, RankFailedError), match="data set 'train' has no rows: expected at least"):
        spark_hvd.run(count_rows, data={"train": nothing}, spark=spark, **MINE)


def rows() -> list[dict[str, Any]]:
    import spark_hvd.torch as hvd

    return [row for batch in hvd.get_dataset_shard("train").arrow_batches() for row in batch.to_pylist()]


def test_tables_in_memory(spark: SparkSession) -> None:
    """Values are unchanged, even if PySpark uses pandas for them: null integers, times, lists, structs."""
    table = pa.table(
        {
            "id": pa.array(range(8), pa.uint8()),
            "whole": pa.array([None, 2**53 + 1, *range(6)], pa.int64()),
            "yes": pa.array([None, True] * 4),
            "half": pa.array([None, float("inf"), *[0.5] * 6], pa.float32()),
            "name": [None, "", "x", "é", *"abcd"],
            "raw": pa.array([None, b"", b"\0\xff", *[b"x"] * 5], pa.binary()),
            "day": pa.array([None, 0, *range(6)], pa.date32()),
            "price": pa.array([None, *map(Decimal, range(7))], pa.decimal128(9, 2)),
            "instant": pa.array([None, 10**15 + 1, *range(6)], pa.timestamp("us", "UTC")),
            "at": pa.array([None, 10**15 + 1, *range(6)], pa.timestamp("us")),
            "date": pa.array([None, 0, *[86_400_000] * 6], pa.date64()),
            "fixed": pa.array([None, *[[0.5, 1.5]] * 7], pa.list_(pa.float32(), 2)),
            "map": pa.array([None, [], *[[("a", 1), ("b", None)]] * 6], pa.map_(pa.string(), pa.int32())),
            "kind": pa.array([None, *"abababa"]).dictionary_encode(),
            "many": pa.array([None, [], [1, None], *[[7]] * 5], pa.list_(pa.int64())),
            "pair": pa.array([None, {"a": 1, "b": None}, *[{"a": 2, "b": "y"}] * 6]),
        }
    )
    shares = spark_hvd.run(rows, data={"train": table}, spark=spark, **MINE)
    assert sorted((row for share in shares for row in share), key=lambda row: row["id"]) == table.to_pylist()


def test_run_local() -> None:
    assert spark_hvd.run_local(train, **MINE) == [(0, 2, 2.0), (1, 2, 2.0)]


def test_run_local_does_not_warn_of_forks() -> None:
    code = "import os, spark_hvd; print(spark_hvd.run_local(os.getpid, num_proc=2, verbose=0))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert "multi-threaded" not in done.stderr, "Python 3.12 warns of forks"


def test_elastic(spark: SparkSession) -> None:
    results = spark_hvd.run_elastic(train_elastic, args=[8], spark=spark, min_num_proc=1, **MINE)
    assert {step for step, _, _ in results} == {8}
    assert {generation for _, _, generation in results} != {0}


def test_torch_estimator(spark: SparkSession, df: DataFrame, tmp_path: Path) -> None:
    fitted(torch_estimator(terminate_on_nan=False), TorchModel, df, tmp_path)


def test_lightning_estimator(spark: SparkSession, df: DataFrame, tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")
    from spark_hvd.estimators import LightningEstimator, LightningModel

    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def forward(self, features: torch.Tensor) -> torch.Tensor:
            return self.layer(features)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return nn.functional.mse_loss(self(batch["features"]).squeeze(-1), batch["value"])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.05)

    fitted(LightningEstimator(model=Net(), **settings(validation=None)), LightningModel, df, tmp_path)


def test_petastorm_reader(spark: SparkSession, df: DataFrame) -> None:
    if importlib.util.find_spec("petastorm") is None:
        pytest.skip("petastorm is not there")
    assert len(torch_estimator(reader="petastorm").fit(df).getHistory()) == 2


def test_mpi(spark: SparkSession) -> None:
    pytest.importorskip("mpi4py")
    assert spark_hvd.run(train, spark=spark, backend="mpi", **MINE) == [(0, 2, 2.0), (1, 2, 2.0)]


def test_checkpoints(tmp_path: Path) -> None:
    assert spark_hvd.run_local(keep, args=[str(tmp_path)], **MINE) == [(7, [0.0, 1.0, 2.0])] * 2


def test_doctor(spark: SparkSession) -> None:
    report = spark_hvd.doctor(spark, num_proc=2)
    assert [finding for finding in report.findings if finding.level is Level.ERROR] == []


SCRIPT = """
import sys, torch, helper
import spark_hvd.torch as hvd
print(helper.NAME, float(hvd.allreduce(torch.ones(1), op=hvd.Sum)))
if "fail" in sys.argv:
    raise KeyError("distance")
"""


def command(folder: Path, *arguments: str) -> tuple[int, list[str], str]:
    words = [sys.executable, "-m", "spark_hvd.runner.cli", *arguments]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=500, check=False)
    said = [line for line in done.stdout.splitlines() if "[Gloo]" not in line]  # which torch 2.8 prints at each start
    return done.returncode, sorted(said), done.stderr


def test_command_line(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "helper.py").write_text("NAME = 'beside'")
    code, out, err = command(tmp_path, "run", "-np", "2", "train.py")
    assert (code, out) == (0, ["[0] beside 2.0", "[1] beside 2.0"]), err
    code, _, err = command(tmp_path, "run", "-np", "2", "train.py", "fail")
    assert code == 1
    assert "KeyError: 'distance'" in err
    code, out, err = command(tmp_path, "check-build")
    assert code == 0, err


def test_command_line_on_spark(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "helper.py").write_text("NAME = 'shipped'")
    loopback = ["spark.driver.host=127.0.0.1", "spark.driver.bindAddress=127.0.0.1", "spark.ui.enabled=false"]
    conf = [word for setting in loopback for word in ("--conf", setting)]
    files = ["--py-files", str(tmp_path / "lib" / "helper.py")]
    code, out, err = command(tmp_path, "run", "-np", "2", "--master", "local[2]", *files, *conf, "train.py")
    assert (code, out) == (0, ["[0] shipped 2.0", "[1] shipped 2.0"]), err


def test_connect() -> None:
    """On Spark Connect, in its own process, if this PySpark has a server and its packages are installed."""
    import pyspark

    if int(pyspark.__version__.partition(".")[0]) < 4:
        pytest.skip("PyPI's PySpark 3.5 has no Connect server")
    for package in ("grpc", "grpc_status", "google.rpc"):
        pytest.importorskip(package)
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=500, check=False)
    assert done.stdout.splitlines()[-1:] == ["connected"], done.stderr[-4000:]


def on_connect() -> None:
    """The program of :func:`test_connect`."""
    from pyspark.sql import SparkSession

    session = SparkSession.builder.remote("local[2]").getOrCreate()
    assert spark_hvd.run(train, spark=session, **MINE) == [(0, 2, 2.0), (1, 2, 2.0)]
    assert spark_hvd.run(train, spark=session, verbose=0) == [(0, 2, 2.0), (1, 2, 2.0)]  # its slots
    session.stop()
    print("connected")


if __name__ == "__main__":
    on_connect()
