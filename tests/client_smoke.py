"""Runs every feature once over Spark Connect with pyspark-client, which has no Java and only half of PySpark's modules.

tests/matrix.py runs this in an environment with that client. The servers and their executors use the interpreters in
SPARK_HVD_SERVERS, each of which has a complete PySpark of another version.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import pytest
import torch

import spark_hvd
from spark_hvd.estimators import TorchEstimator, TorchModel
from spark_hvd.runner import Level, RankFailedError, Reporting
from tests.daemons import connect_server

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.timeout(600)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # executors cannot import tests
MINE: dict[str, Any] = {"num_proc": 2, "verbose": 0}
SERVERS = {Path(each).parents[1].name: each for each in os.environ["SPARK_HVD_SERVERS"].split(os.pathsep)}


@pytest.fixture(scope="module", params=SERVERS.values(), ids=SERVERS)
def spark(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    from pyspark.sql import SparkSession

    python: str = request.param
    where = "import os, pyspark; print(os.path.dirname(pyspark.__file__))"
    home = Path(subprocess.run([python, "-c", where], capture_output=True, text=True, check=True).stdout.strip())
    assert not (Path(sys.modules["pyspark"].__file__ or "").parent / "jars").exists(), "this is the whole of PySpark"
    with connect_server(home, tmp_path_factory.mktemp("server"), {}, PYSPARK_PYTHON=python) as address:
        session = SparkSession.builder.remote(address).getOrCreate()
        yield session
        session.stop()


@pytest.fixture(scope="module")
def df(spark: SparkSession) -> DataFrame:
    return spark.range(1000).selectExpr("array(rand(1), rand(2)) AS x").selectExpr("x", "x[0] - 2 * x[1] AS y")


def rows_seen(twice: bool = False) -> tuple[int, int]:
    import spark_hvd.torch as hvd

    batches = hvd.get_dataset_shard("train").torch_batches(50)
    return hvd.rank(), sum(len(batch["y"]) for _ in range(1 + twice) for batch in batches)


def go_elastic() -> tuple[int, int]:
    import spark_hvd.torch as hvd

    @hvd.elastic.run
    def go(state: Any) -> tuple[int, int]:
        return hvd.rank(), hvd.size()

    result: tuple[int, int] = go(hvd.elastic.ObjectState(number=0))
    return result


def test_runs(spark: SparkSession, df: DataFrame) -> None:
    assert spark_hvd.run(rows_seen, data={"train": df}, spark=spark, **MINE) == [(0, 500), (1, 500)]
    assert spark_hvd.run_elastic(go_elastic, spark=spark, **MINE) == [(0, 2), (1, 2)]
    everywhere = spark_hvd.run(rows_seen, data={"train": df}, spark=spark, verbose=0)
    assert everywhere == [(0, 500), (1, 500)], "the server has two slots"


def test_an_error_of_a_rank(spark: SparkSession) -> None:
    def fails() -> None:
        raise ValueError("bad batch")

    with pytest.raises(RankFailedError, match="bad batch"):
        spark_hvd.run(fails, spark=spark, **MINE)


class Stream(io.StringIO):
    """A stream that calls a function with everything written so far, at every write."""

    def __init__(self, seen: Callable[[str], None]) -> None:
        super().__init__()
        self._seen = seen

    def write(self, text: str) -> int:
        count = super().write(text)
        self._seen(self.getvalue())
        return count


def test_output_comes_while_ranks_run_and_an_interrupt_stops_them(spark: SparkSession, tmp_path: Path) -> None:
    def wait() -> str:
        print("waiting", flush=True)
        while not (tmp_path / "seen").exists():
            time.sleep(0.05)
        return "seen"

    def touch(text: str) -> None:
        if "[0] waiting" in text and "[1] waiting" in text:
            (tmp_path / "seen").touch()

    def interrupt(text: str) -> None:
        if "waiting" in text:
            raise KeyboardInterrupt

    def told(seen: Callable[[str], None]) -> Reporting:
        return Reporting(stdout=Stream(seen))

    assert spark_hvd.run(wait, num_proc=2, spark=spark, reporting=told(touch)) == ["seen", "seen"]
    (tmp_path / "seen").unlink()
    with pytest.raises(KeyboardInterrupt):
        spark_hvd.run(wait, num_proc=2, spark=spark, reporting=told(interrupt))
    assert spark_hvd.run(int, spark=spark, **MINE) == [0, 0], "the slots are free again"


def estimator() -> TorchEstimator:
    net = torch.nn.Linear(2, 1)
    for each in net.parameters():
        torch.nn.init.zeros_(each)
    return TorchEstimator(
        model=net,
        optimizer=lambda params: torch.optim.Adam(params, lr=0.1),
        loss=torch.nn.MSELoss(),
        feature_cols=["x"],
        label_cols=["y"],
        batch_size=50,
        epochs=2,
        **MINE,
    )


def test_an_estimator_and_its_model(df: DataFrame, tmp_path: Path) -> None:
    model = estimator().fit(df)
    model.write().overwrite().save(str(tmp_path / "model"))
    predicted = TorchModel.load(str(tmp_path / "model")).transform(df).first()
    assert predicted is not None
    with torch.no_grad():
        wanted = model.getModel()(torch.tensor([predicted.x]))
    assert predicted.prediction == pytest.approx(float(wanted), rel=1e-4)
    assert spark_hvd.predict(df, model.getModel(), columns="x", outputs="array<float>").count() == 1000


def test_cross_validator(df: DataFrame, tmp_path: Path) -> None:
    from pyspark.ml.evaluation import RegressionEvaluator
    from pyspark.ml.tuning import CrossValidator, CrossValidatorModel, ParamGridBuilder

    made, evaluator = estimator(), RegressionEvaluator(labelCol="y")
    grid = ParamGridBuilder().addGrid(made.epochs, [1, 8]).build()
    validator = CrossValidator(
        estimator=made, estimatorParamMaps=grid, evaluator=evaluator, numFolds=2, seed=1, parallelism=2
    )
    model = validator.fit(df)
    assert model.avgMetrics[1] < model.avgMetrics[0], "five steps cannot get as far as forty"
    assert len(model.bestModel.getHistory()) == 8
    model.write().save(str(tmp_path / "chosen"))
    again = CrossValidatorModel.load(str(tmp_path / "chosen"))
    assert isinstance(again.bestModel, TorchModel)
    assert evaluator.evaluate(again.transform(df)) == pytest.approx(evaluator.evaluate(model.transform(df)))


def test_the_doctor(spark: SparkSession) -> None:
    assert not [each for each in spark_hvd.doctor(spark=spark).findings if each.level == Level.ERROR]
