"""A saved TorchModel is complete: in another process, in a pipeline, in cross-validation; damage is named."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import cloudpickle
import pytest
import safetensors.torch
import torch
from pyspark.ml import Estimator, Pipeline, PipelineModel
from pyspark.ml.evaluation import RegressionEvaluator
from pyspark.ml.feature import VectorAssembler
from pyspark.ml.tuning import CrossValidatorModel
from pyspark.ml.util import DefaultParamsReadable, DefaultParamsWritable
from torch import nn

from spark_hvd.data.readers.dataset import Column
from spark_hvd.estimators.params import checks
from spark_hvd.estimators.params.params import rows
from spark_hvd.estimators.params.persistence import SavedParams
from spark_hvd.estimators.torch.model import TorchModel
from spark_hvd.estimators.training.head import Head
from spark_hvd.estimators.training.inputs import TensorSpec
from spark_hvd.estimators.transform.meta import ModelMeta
from spark_hvd.store.errors import CheckpointError, StoreError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

cloudpickle.register_pickle_by_value(sys.modules[__name__])
ROOT = Path(__file__).parents[2]


class FixedEstimator(Estimator[TorchModel], DefaultParamsWritable, DefaultParamsReadable["FixedEstimator"]):
    """Does not train."""

    def _fit(self, dataset: DataFrame) -> TorchModel:
        raise NotImplementedError


class Net(nn.Module):
    """A class that no other process can import."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layer(rows)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def numbers(spark: SparkSession) -> DataFrame:
    return spark.range(0, 6, 1, 2).selectExpr("id", "cast(id as double) a", "id / 4 as b", "cast(id as int) label")


@pytest.fixture
def model() -> TorchModel:
    torch.manual_seed(1)
    net = Net()
    meta = ModelMeta(
        (TensorSpec(Column("features", "float32", (2,), "vector"), "float32", (-1, 2)),),
        (Column("label", "int32", (), "int"),),
        Head("regression"),
        ((1,),),
    )
    return TorchModel(
        model=net,
        history=[{"epoch": 0, "train": {"loss": 0.5}}, {"epoch": 1, "train": {"loss": float("inf")}}],
        optimizer=torch.optim.SGD(net.parameters(), lr=0.125, momentum=0.9),
        loss=nn.MSELoss(),
        feature_columns=["features"],
        label_columns=["label"],
        input_shapes=[[-1, 2]],
        run_id="run7",
        batch_size=3,
        metadata=meta,
    )


def test_all_params_come_back(spark: SparkSession, model: TorchModel, tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    model.save(path)
    back = TorchModel.load(path)
    assert back.uid == model.uid
    assert back.getHistory() == model.getHistory()
    assert back.getMetadata() == model.getMetadata()
    assert (back.getRunId(), back.getBatchSize(), back.getInputShapes()) == ("run7", 3, [(-1, 2)])
    assert isinstance(back.getLoss()[0], nn.MSELoss)
    assert torch.equal(back.getModel().layer.weight, model.getModel().layer.weight)
    assert back.getOptimizer().param_groups[0]["params"][0] is back.getModel().layer.weight
    assert back.getOptimizer().param_groups[0]["lr"] == 0.125
    assert not back.isSet(back.use_gpu)
    assert sorted(file.name for file in Path(path).iterdir()) == ["metadata", "structure.pkl", "weights.safetensors"]
    assert set(safetensors.torch.load_file(f"{path}/weights.safetensors")) == {
        "model.layer.weight",
        "model.layer.bias",
    }
    with pytest.raises(StoreError, match=r"it already exists; replace it with write\(\)\.overwrite\(\)"):
        model.save(path)
    model.setParams(batch_size=4).write().overwrite().save(path)
    assert TorchModel.load(path).getBatchSize() == 4


def predictions(pipeline: PipelineModel, numbers: DataFrame) -> list[tuple[Any, ...]]:
    found = [(row.id, row.label__output, row.prediction) for row in pipeline.transform(numbers).collect()]
    assert len({round(prediction, 3) for *_, prediction in found}) == 6
    return sorted(found)


def test_pipeline(spark: SparkSession, model: TorchModel, numbers: DataFrame, tmp_path: Path) -> None:
    path = str(tmp_path / "pipeline")
    pipeline = PipelineModel([VectorAssembler(inputCols=["a", "b"], outputCol="features"), model])
    pipeline.write().overwrite().save(path)
    pipeline.write().overwrite().save(path)
    assert predictions(PipelineModel.load(path), numbers) == predictions(pipeline, numbers)


@pytest.mark.slow
def test_pipeline_in_another_process(
    spark: SparkSession, model: TorchModel, numbers: DataFrame, tmp_path: Path
) -> None:
    path = str(tmp_path / "pipeline")
    pipeline = PipelineModel([VectorAssembler(inputCols=["a", "b"], outputCol="features"), model])
    pipeline.write().overwrite().save(path)
    expected = predictions(pipeline, numbers)
    numbers.write.parquet(str(tmp_path / "numbers"))
    script = f"""
        import json
        from pyspark.ml import Estimator, Pipeline, PipelineModel
        from tests.conftest import start_session
        spark = start_session("local[1]")
        result = PipelineModel.load({path!r}).transform(spark.read.parquet({str(tmp_path / "numbers")!r}))
        print(json.dumps(sorted([row.id, row.label__output, row.prediction] for row in result.collect())))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    assert [tuple(row) for row in json.loads(done.stdout.splitlines()[-1])] == expected


@pytest.mark.slow  # by day: a pipeline, above
def test_cross_validator_model(spark: SparkSession, model: TorchModel, tmp_path: Path) -> None:
    path = str(tmp_path / "cv")
    assembler = VectorAssembler(inputCols=["a", "b"], outputCol="features")
    chosen = CrossValidatorModel(PipelineModel([assembler, model]), avgMetrics=[1.5])
    chosen.set(chosen.estimator, Pipeline(stages=[assembler, FixedEstimator()]))
    chosen.set(chosen.estimatorParamMaps, [{}])
    chosen.set(chosen.evaluator, RegressionEvaluator())
    chosen.save(path)
    back = CrossValidatorModel.load(path)
    assert back.avgMetrics == [1.5]
    assert back.bestModel.stages[1].uid == model.uid  # type: ignore[attr-defined]


def metadata_of(path: Path) -> tuple[Path, dict[str, Any]]:
    (file,) = (path / "metadata").glob("part-*")
    (file.parent / f".{file.name}.crc").unlink(missing_ok=True)  # editing a file below changes its checksum
    return file, json.loads(file.read_text())


def test_damage_is_named(spark: SparkSession, model: TorchModel, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    model.save(str(path))
    with pytest.raises(CheckpointError, match=r"cannot read .*/none/metadata: .*Expected a saved TorchModel at "):
        TorchModel.load(str(tmp_path / "none"))

    weights = (path / "weights.safetensors").read_bytes()
    (path / "weights.safetensors").write_bytes(weights[:-4])
    with pytest.raises(CheckpointError, match=rf"weights\.safetensors is damaged: its {len(weights) - 4} bytes"):
        TorchModel.load(str(path))
    (path / "weights.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"weights\.safetensors is missing or cannot be read"):
        TorchModel.load(str(path))
    (path / "weights.safetensors").write_bytes(weights)

    file, metadata = metadata_of(path)
    file.write_text(json.dumps({**metadata, "format_version": 99, "spark_hvd": "7.1"}))
    with pytest.raises(CheckpointError, match=r"format version 99, written by spark_hvd 7\.1; .*install a newer"):
        TorchModel.load(str(path))
    file.write_text(json.dumps({**metadata, "class": "x.Other"}))
    with pytest.raises(CheckpointError, match=r"holds a x\.Other, not a TorchModel"):
        TorchModel.load(str(path))
    file.write_text(json.dumps(metadata)[:-20])
    with pytest.raises(CheckpointError, match=r"metadata is truncated, or was not written by spark_hvd"):
        TorchModel.load(str(path))
    file.write_text(json.dumps(metadata))
    assert TorchModel.load(str(path)).uid == model.uid


def test_missing_code_is_named(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "from torch import nn\nclass Net(nn.Linear):\n    pass\n"
    (tmp_path / "their_models.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    import their_models  # type: ignore[import-not-found]

    path = str(tmp_path / "saved")
    TorchModel(model=their_models.Net(2, 1), feature_columns=["x"], label_columns=["y"]).save(path)
    monkeypatch.delattr(their_models, "Net")
    with pytest.raises(CheckpointError, match=r"does not fit the code that is installed here \(saved with torch"):
        TorchModel.load(path)
    monkeypatch.delitem(sys.modules, "their_models")
    (tmp_path / "their_models.py").unlink()
    with pytest.raises(CheckpointError, match=r"needs the module 'their_models', which is not installed here"):
        TorchModel.load(path)


class Thing(SavedParams):
    """A class with a table, like an estimator."""

    _table: ClassVar = rows(
        "", ("size", 1, checks.whole(1), ""), ("act", None, checks.function, ""), ("secret", None, checks.anything, "")
    )
    _not_saved: ClassVar = ["secret"]


def test_any_table_of_params(spark: SparkSession, tmp_path: Path) -> None:
    path, factor = str(tmp_path / "thing"), 3
    Thing(size=2, act=lambda x: x * factor, secret="s").save(path)
    back = Thing.load(path)
    assert back.getOrDefault("size") == 2
    assert back.getOrDefault("act")(5) == 15
    assert back.getOrDefault("secret") is None
