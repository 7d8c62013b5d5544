"""Real MLflow with spark_hvd: trackers of runs and estimators; autologging, which creates one run and little noise."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import pandas as pd
import pytest
import torch
from pyspark.ml.functions import array_to_vector
from torch import nn

from spark_hvd import run_local
from spark_hvd.estimators import DataError, LocalBackend, Store, TorchModel
from spark_hvd.runner import MlflowTracker, RankFailedError, Reporting, RunResult
from tests.later import Later
from tests.spark.estimator_support import estimator, frame
from tests.spark.keras.support import estimator as of_keras
from tests.spark.keras.support import net

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

mlflow: Any = Later("mlflow")
cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("no_leaks"),
    pytest.mark.filterwarnings("ignore:::mlflow"),
]


@pytest.fixture(autouse=True)
def mlruns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A store for this test only; nothing is written anywhere else."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.chdir(tmp_path)
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(f"file://{tmp_path}/mlruns")
    mlflow.set_experiment("Default")
    yield str(mlflow.get_tracking_uri())
    mlflow.set_tracking_uri(before)


@pytest.fixture
def autolog() -> Iterator[Callable[..., None]]:
    yield mlflow.pyspark.ml.autolog
    mlflow.pyspark.ml.autolog(disable=True)


def runs() -> list[Any]:
    return list(mlflow.search_runs(output_format="list", search_all_experiments=True))


@pytest.fixture(scope="module")
def df(spark: SparkSession) -> DataFrame:
    return frame(spark).cache()


def train(loss: float) -> int:
    import spark_hvd.torch as hvd

    bar = hvd.progress(3, epoch=0)
    for _ in range(3):
        bar.step(loss=loss, samples=8)
    return hvd.rank()


def fail() -> None:
    import spark_hvd.torch as hvd

    if hvd.rank() == 1:
        raise ValueError("bad batch")


def test_a_run_and_one_that_fails() -> None:
    tracker = MlflowTracker("e", "first")
    result = run_local(train, (0.5,), num_proc=2, reporting=Reporting(tracker=tracker), verbose=0)
    assert isinstance(result, RunResult)
    assert result == [0, 1]
    assert result.summary is not None
    with pytest.raises(RankFailedError):
        run_local(fail, num_proc=2, reporting=Reporting(tracker=tracker), verbose=0)
    failed, done = runs()
    assert (done.info.status, failed.info.status) == ("FINISHED", "FAILED")
    assert done.data.metrics["loss"] == 0.5
    assert done.data.metrics["summary/steps"] == result.summary.steps == 3
    assert {"system/rank_0/memory_mb", "system/rank_1/memory_mb"} <= done.data.metrics.keys()
    assert done.data.params["spark_hvd.function"] == "train"
    assert "bad batch" in failed.data.tags["spark_hvd.error"]


def log_on_rank_0(run_id: str) -> None:
    """The advice of docs/tracking.md for MLflow in the function itself."""
    import mlflow

    import spark_hvd.torch as hvd

    if hvd.rank() == 0:
        mlflow.MlflowClient().log_metric(run_id, "mine", 7.0)


def test_what_rank_0_logs_itself_goes_into_the_same_run(mlruns: str) -> None:
    with mlflow.start_run() as parent:
        env = {"MLFLOW_TRACKING_URI": mlruns}
        run_local(
            log_on_rank_0,
            (parent.info.run_id,),
            num_proc=2,
            env=env,
            reporting=Reporting(tracker=MlflowTracker()),
            verbose=0,
        )
    (only,) = runs()
    assert only.data.metrics["mine"] == 7
    assert only.data.params["spark_hvd.num_proc"] == "2"
    assert only.info.status == "FINISHED"


def test_the_tracker_of_an_estimator(df: DataFrame, tmp_path: Path) -> None:
    tracked = estimator(
        tracker=MlflowTracker(run_name="fit"), store=Store.create(tmp_path / "store"), validation="held", epochs=3
    )
    fitted = tracked.fit(df)
    (only,) = runs()
    assert only.info.run_name == "fit"
    assert only.info.status == "FINISHED"
    assert only.data.params["spark_hvd.function"] == "TorchEstimator"
    history = fitted.getHistory()
    for name in ("loss", "val_loss"):
        points = mlflow.MlflowClient().get_metric_history(only.info.run_id, name)
        logged = [(point.step, point.value) for point in sorted(points, key=lambda point: point.step)]
        assert logged == [(row["epoch"], row[name]) for row in history]
    told = {"epochs": "3", "batch_size": "16", "optimizer_name": "SGD", "lr": "0.05", "validation": "held"}
    assert told.items() <= only.data.params.items()
    tracked.save(f"file://{tmp_path}/saved")  # without its tracker
    assert type(tracked).load(f"file://{tmp_path}/saved").getTracker() is None
    with pytest.raises(ValueError, match=r"SparkBackend\(tracker="):
        estimator(tracker=MlflowTracker(), num_proc=None, backend=LocalBackend(2)).fit(df)


def test_autologging_of_an_estimator_makes_one_run(
    df: DataFrame, autolog: Callable[..., None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two warnings are MLflow's: our model is not in its list, and a long value was truncated."""
    autolog()
    deep = nn.Sequential(nn.Linear(3, 1), *(nn.Sequential(nn.Linear(1, 1), nn.ReLU()) for _ in range(300)))
    backend = LocalBackend(2, reporting=Reporting(tracker=MlflowTracker()))
    store = Store.create(tmp_path / "store")
    model = estimator(deep, epochs=1, num_proc=None, backend=backend, store=store).fit(df)
    (only,) = runs()
    assert mlflow.active_run() is None
    assert only.info.status == "FINISHED"
    assert only.data.params["epochs"] == "1"  # MLflow's
    assert only.data.params["model"].startswith("Sequential(")
    assert only.data.params["spark_hvd.num_proc"] == "2"  # the tracker's: the same run
    assert "loss" in only.data.metrics
    assert [record for record in caplog.records if record.name.startswith("spark_hvd")] == []
    theirs = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(theirs) == 2, theirs
    assert [row["epoch"] for row in model.getHistory()] == [1]


def log_as_alone() -> None:
    """Written like a single-process function: autologging, then a logged metric, on every rank."""
    import mlflow

    mlflow.autolog(silent=True)
    mlflow.log_metric("mine", 1.0)


def only_rank_0() -> None:
    import spark_hvd.torch as hvd

    if hvd.rank() == 0:
        log_as_alone()


def test_logging_on_every_rank_makes_a_run_each_and_on_rank_0_one(mlruns: str) -> None:
    env = {"MLFLOW_TRACKING_URI": mlruns}
    run_local(log_as_alone, num_proc=2, env=env, reporting=Reporting(stdout=io.StringIO(), stderr=io.StringIO()))
    assert len(runs()) == 2  # the pitfall, as documented
    run_local(only_rank_0, num_proc=2, env=env, reporting=Reporting(stdout=io.StringIO(), stderr=io.StringIO()))
    assert len(runs()) == 3


# -- logged models

LOADS = """
import sys
sys.modules["spark_hvd"] = sys.modules["pyspark"] = None  # to import them is an error
import mlflow, pandas as pd
for number, uri in enumerate(sys.argv[2:]):
    model = mlflow.pyfunc.load_model(uri)
    rows = pd.read_pickle(f"{sys.argv[1]}/rows-{number}.pkl")
    model.predict(rows).to_pickle(f"{sys.argv[1]}/predicted-{number}.pkl")
"""


class TwoInputs(nn.Module):
    """Returns two outputs: a number, and two numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.features, self.number = nn.Linear(3, 4), nn.Linear(1, 4)

    def forward(self, features: torch.Tensor, number: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        both = torch.tanh(self.features(features)) + self.number(number.unsqueeze(1))
        return both.sum(1) * 3, both[:, :2]


def test_a_logged_model_predicts_the_same_without_us(df: DataFrame, tmp_path: Path) -> None:
    torch.manual_seed(0)
    vectors = df.withColumn("vector", array_to_vector("features"))
    models = [
        TorchModel(
            model=nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3)),
            feature_columns=["vector"],
            label_columns=["late"],
            loss=nn.CrossEntropyLoss(),
        ),
        TorchModel(
            model=TwoInputs(), feature_columns=["features", "value"], label_columns=["row", "features"], batch_size=64
        ),
    ]
    uris, expected = [], []
    for number, model in enumerate(models):
        names = model.value_of("feature_columns")
        more = {"extra_pip_requirements": ["packaging"]} if number else {"metadata": {"of": "flights"}}
        info = model.log_to_mlflow(vectors, registered_model_name=None if number else "lateness", **more)
        assert [each.name for each in info.signature.inputs] == names
        rows = vectors.toPandas()
        rows["vector"] = [each.toArray().tolist() for each in rows["vector"]]
        rows[names].to_pickle(tmp_path / f"rows-{number}.pkl")
        expected.append(model.transform(vectors).toPandas().drop(columns=vectors.columns))
        assert [each.name for each in info.signature.outputs] == list(expected[-1])
        uris.append(info.model_uri if number else "models:/lateness/1")
    subprocess.run([sys.executable, "-c", LOADS, str(tmp_path), *uris], check=True, cwd=tmp_path, timeout=250)
    for number, wanted in enumerate(expected):
        found = pd.read_pickle(tmp_path / f"predicted-{number}.pkl")
        assert list(found) == list(wanted)
        for name in wanted:
            assert [*map(_plain, found[name])] == [*map(_plain, wanted[name])], name


def _plain(value: Any) -> Any:
    value = value.toArray() if hasattr(value, "toArray") else value
    return value.tolist() if hasattr(value, "tolist") else value


def test_a_logged_model_has_the_metrics_of_its_epoch(df: DataFrame, tmp_path: Path) -> None:
    """The best one's, which is the first if more is better; loaded from files; registered if requested."""
    best = estimator(
        validation="held", epochs=3, monitor="val_loss", monitor_mode="max", restore_best_weights=True,
        store=Store.create(tmp_path / "store"),
    ).fit(df)  # fmt: skip
    row = max(best.getHistory(), key=lambda each: each["val_loss"])
    assert row["epoch"] < 3
    best.save(f"file://{tmp_path}/saved")
    for model in (best, TorchModel.load(f"file://{tmp_path}/saved")):
        info = model.log_to_mlflow(df, registered_model_name="winner")
        logged = mlflow.get_logged_model(info.model_id).metrics
        assert {(each.key, each.value, each.step) for each in logged} == {
            (name, value, row["epoch"]) for name, value in row.items() if name != "epoch"
        }
    versions = mlflow.MlflowClient().search_model_versions("name='winner'")
    assert {str(each.version) for each in versions} == {"1", "2"}
    assert {each.model_id for each in versions} >= {info.model_id}


def test_the_checkpoint_of_each_epoch_is_a_model_with_its_metrics(df: DataFrame, tmp_path: Path) -> None:
    """They are in the fit's run; the best, which is the first if more is better, is registered."""
    tracker = MlflowTracker(checkpoints=True, registered_model_name="lateness")
    store = Store.create(tmp_path / "store")
    fitted = estimator(
        tracker=tracker, store=store, validation="held", epochs=3, monitor="val_loss", monitor_mode="max"
    ).fit(df)
    (only,) = runs()
    assert (only.info.run_id, only.info.status) == (tracker.run_id, "FINISHED")
    logged = {each.name: each for each in mlflow.search_logged_models(output_format="list")}
    assert sorted(logged) == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    for row in fitted.getHistory():
        found = logged[f"checkpoint-{row['epoch']}"]
        assert found.source_run_id == tracker.run_id
        # MLflow also links other values that the run has of this step, such as a rank's memory.
        linked = {(each.key, each.value, each.step) for each in found.metrics if not each.key.startswith("system/")}
        assert linked == {(name, value, row["epoch"]) for name, value in row.items() if name != "epoch"}
    best = max(fitted.getHistory(), key=lambda row: row["val_loss"])["epoch"]
    assert best < 3
    (version,) = mlflow.MlflowClient().search_model_versions("name='lateness'")
    assert version.model_id == logged[f"checkpoint-{best}"].model_id
    rows = df.select("features").toPandas()
    wanted = [row[0] for row in fitted.transform(df).select("prediction").collect()]
    last, first = (mlflow.pyfunc.load_model(logged[f"checkpoint-{epoch}"].model_uri) for epoch in (3, 1))
    assert list(last.predict(rows)["prediction"]) == pytest.approx(wanted, rel=1e-6)
    assert list(first.predict(rows)["prediction"]) != pytest.approx(wanted, rel=1e-3)
    assert {path.name for path in Path(store.run_path(fitted.value_of("run_id"))).glob("*.ckpt")} <= {
        "last.ckpt",
        "best.ckpt",
    }


def test_checkpoints_of_keras_are_models_of_keras(df: DataFrame, tmp_path: Path) -> None:
    pytest.importorskip("keras")
    backend = LocalBackend(2, reporting=Reporting(tracker=MlflowTracker(checkpoints=True)))
    fitted = of_keras(net(), backend=backend, store=Store.create(tmp_path / "store")).fit(df)
    logged = {each.name: each for each in mlflow.search_logged_models(output_format="list")}
    assert sorted(logged) == ["checkpoint-1", "checkpoint-2"]
    losses = [metric.value for name in sorted(logged) for metric in logged[name].metrics if metric.key == "loss"]
    assert losses == [row["loss"] for row in fitted.getHistory()]
    uri = logged["checkpoint-2"].model_uri
    needs = Path(mlflow.pyfunc.get_model_dependencies(uri)).read_text().splitlines()
    assert f"torch=={torch.__version__.partition('+')[0]}" in needs  # PyPI has no 2.13.0+cpu
    loaded = mlflow.keras.load_model(uri)
    for one, two in zip(loaded.get_weights(), fitted.getModel().get_weights(), strict=True):
        assert (one == two).all()


def test_checkpoints_that_cannot_be_logged(
    df: DataFrame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After training this is a warning, and they are kept; if known before, it is an error."""
    store, tracker = Store.create(tmp_path / "store"), MlflowTracker(checkpoints=True)
    backend = LocalBackend(2, reporting=Reporting(tracker=tracker))
    one = estimator(num_proc=None, backend=backend, store=store, epochs=1, run_id="one")
    with pytest.raises(ValueError, match="with fit_on_parquet: the signature of models comes from rows"):
        one.fit_on_parquet(str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(TorchModel, "log_to_mlflow", lambda *args, **options: {}["gone"])
        assert len(one.fit(df).getHistory()) == 1
    assert "MLflow lacks the checkpoints of some epochs; the trained model is not affected: KeyError" in caplog.text
    assert Path(store.checkpoint_path("one", "epoch-1.ckpt")).exists()
    assert len(one.fit(df).getHistory()) == 1, "nothing is left to train"
    assert [each.name for each in mlflow.search_logged_models(output_format="list")] == ["checkpoint-1"]
    with pytest.raises(ValueError, match=r"is for the fit of an estimator; .* leave checkpoints out"):
        run_local(train, (0.5,), num_proc=2, reporting=Reporting(tracker=tracker), verbose=0)
    with pytest.raises(ValueError, match="registered_model_name='lateness' without checkpoints=True"):
        MlflowTracker(registered_model_name="lateness")


def test_what_cannot_be_logged(df: DataFrame) -> None:
    model = TorchModel(model=nn.Linear(3, 1), feature_columns=["features"], label_columns=["value"])
    with pytest.raises(ValueError, match="a DataFrame without rows: the signature needs some"):
        model.log_to_mlflow(df.limit(0))
    with pytest.raises(DataError, match="feature_columns names 'features', which the DataFrame does not have"):
        model.log_to_mlflow(df.drop("features"))
