"""LightningEstimator: Lightning's Trainer in ranks, in terms of what a user sees: weights, history, files, errors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import lightning as L  # noqa: N812 - the name that everybody gives it
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger
from torch import nn

from spark_hvd.estimators import (
    History,
    LightningEstimator,
    LightningModel,
    LocalBackend,
    ModelError,
    NotFiniteLossError,
    Store,
    TorchEstimator,
)
from tests.ranks import RankError, Ranks

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

ROWS = 401


class Warm:
    """A backend whose two ranks stay: they import Lightning once, and not for each fit. A failure ends them."""

    def __init__(self) -> None:
        self._world: Ranks | None = None

    def num_processes(self) -> int:
        return 2

    def run(self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> list:
        self._world = self._world or Ranks(2, timeout=180.0)  # a rank that imports trackers is late
        try:
            return self._world.run(fn, *args)
        except RankError:
            self.close()
            raise

    def close(self) -> None:
        if self._world is not None:
            self._world.close()
            self._world = None


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    backend = Warm()
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def df(spark: SparkSession) -> DataFrame:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(ROWS, 4, generator=generator)
    target = features @ torch.tensor([1.0, -2.0, 0.5, 3.0]) + 1.0
    rows = [(x, y, float(y > 1)) for x, y in zip(features.tolist(), target.tolist(), strict=True)]
    return spark.createDataFrame(rows, "features array<float>, y float, positive double").repartition(3).cache()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the store: one for all, so that the DataFrame is written once."""
    return tmp_path_factory.mktemp("store")


@pytest.fixture
def estimator(warm: Warm, folder: Path) -> Callable[..., LightningEstimator]:
    return partial(
        LightningEstimator,
        backend=warm,
        store=Store.create(folder),
        feature_cols=["features"],
        label_cols=["y"],
        batch_size=32,
        epochs=3,
        random_seed=1,
        verbose=0,
        logger=False,
    )


class Net(L.LightningModule):
    """A regression with a dropout, so that random numbers matter, and a schedule that changes in each epoch."""

    def __init__(self, dropout: float = 0.0, factor: float = 0.5) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 1))
        self.factor = factor

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.layers(features)

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return nn.functional.mse_loss(self(batch["features"]).squeeze(1), batch["y"])

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, self.factor)]


def net(**options: Any) -> Net:
    torch.manual_seed(0)
    return Net(**options)


def weights(model: LightningModel) -> dict[str, torch.Tensor]:
    return dict(model.getModel().state_dict())


def column(model: Any, key: str) -> list[float]:
    history: History = model.getHistory()
    return [row[key] for row in history]


def logs(store: Store, model: LightningModel) -> set[str]:
    root = Path(store.logs_path(model.getRunId()))
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def test_learns_in_spark_tasks(df: DataFrame, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from pyspark.ml.evaluation import RegressionEvaluator

    model = LightningEstimator(
        model=net(factor=1.0),
        task="regression",
        num_proc=2,
        store=Store.create(tmp_path),
        feature_cols=["features"],
        label_cols=["y"],
        batch_size=16,
        epochs=5,
        validation=0.2,
        random_seed=1,
    ).fit(df)
    assert isinstance(model, LightningModel)
    rmse = RegressionEvaluator(labelCol="y").evaluate(model.transform(df))
    assert rmse < 0.5
    rows = model.getHistory()
    assert list(rows[0]) == ["epoch", "loss", "train_loss", "val_loss", "lr", "seconds", "rows_per_second"]
    assert [row["epoch"] for row in rows] == [1, 2, 3, 4, 5]
    assert rows[-1]["val_loss"] < 0.2 * rows[0]["val_loss"]
    assert all(row["loss"] == pytest.approx(row["train_loss"], rel=0.05) for row in rows)
    printed = capfd.readouterr()
    assert "epoch 5/5" in printed.out
    assert "Lightning" not in (printed.out + printed.err).replace("LightningEstimator on 2 ranks", "")
    assert "GPU" not in printed.out + printed.err
    assert "Warning" not in printed.out + printed.err


def test_equals_torch_estimator(df: DataFrame, estimator: Callable[..., LightningEstimator], warm: Warm) -> None:
    mine = estimator(model=net(), label_shapes=[[-1]]).fit(df)
    plain = net().layers
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    theirs = TorchEstimator(
        model=plain,
        optimizer=optimizer,
        loss=nn.MSELoss(),
        scale_lr=False,
        lr_scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        backend=warm,
        store=mine_store(estimator),
        feature_cols=["features"],
        label_cols=["y"],
        batch_size=32,
        epochs=3,
        random_seed=1,
        verbose=0,
    ).fit(df)
    for name, value in theirs.getModel().state_dict().items():
        torch.testing.assert_close(weights(mine)[f"layers.{name}"], value, rtol=1e-5, atol=1e-6)
    assert column(mine, "loss") == pytest.approx(column(theirs, "loss"), rel=1e-5)
    assert column(mine, "lr") == column(theirs, "lr") == [0.05, 0.025, 0.0125]


def mine_store(estimator: Any) -> Store:
    store: Store = estimator.keywords["store"]
    return store


def test_resumed_equals_unbroken(df: DataFrame, estimator: Callable[..., LightningEstimator]) -> None:
    def fit(epochs: int, run_id: str) -> LightningModel:
        return estimator(
            model=net(dropout=0.3, factor=0.7),
            epochs=epochs,
            run_id=run_id,
            validation=0.2,
            callbacks=[
                ModelCheckpoint(dirpath="best", monitor="val_loss", save_top_k=2, filename="{epoch}"),
                EarlyStopping("val_loss", patience=9),
            ],
        ).fit(df)

    unbroken = fit(4, "unbroken")
    fit(2, "resumed")
    resumed = fit(4, "resumed")
    for name, value in weights(unbroken).items():
        assert torch.equal(weights(resumed)[name], value), name
    for key in ("epoch", "loss", "val_loss", "lr"):
        assert column(resumed, key) == column(unbroken, key), key
    assert column(unbroken, "lr") == pytest.approx([0.05, 0.035, 0.0245, 0.01715])
    store = mine_store(estimator)
    files = logs(store, unbroken)
    assert len(files) == 2
    assert logs(store, resumed) == files
    for file in files:
        there = [torch.load(f"{store.logs_path(run)}/{file}", weights_only=False) for run in ("unbroken", "resumed")]
        for part in ("epoch", "global_step"):
            assert there[0][part] == there[1][part], (file, part)
        early = [next(v for k, v in ckpt["callbacks"].items() if "EarlyStopping" in k) for ckpt in there]
        assert early[0]["wait_count"] == early[1]["wait_count"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_callbacks_and_loggers(df: DataFrame, estimator: Callable[..., LightningEstimator], tmp_path: Path) -> None:
    tracking = f"file:{tmp_path / 'mlruns'}"
    model = estimator(
        model=net(),
        epochs=30,
        validation=0.2,
        callbacks=[
            EarlyStopping("val_loss", patience=1, min_delta=1e6),
            ModelCheckpoint(monitor="val_loss", filename="best"),
            LearningRateMonitor(),
        ],
        logger=[CSVLogger("csv", name="run"), TensorBoardLogger("tb", name="run"), MLFlowLogger("e", "r", tracking)],
        log_every_n_steps=2,
    ).fit(df)
    assert len(model.getHistory()) == 2  # nothing is better by a million: stopped after the second
    store = mine_store(estimator)
    files = logs(store, model)
    assert {"csv/run/version_0/metrics.csv", "checkpoints/best.ckpt"} <= files
    assert any(file.startswith("tb/run/version_0/events") for file in files)
    assert len(list((tmp_path / "mlruns").rglob("val_loss"))) == 1
    text = (Path(store.logs_path(model.getRunId())) / "csv/run/version_0/metrics.csv").read_text()
    assert "lr-SGD" in text
    assert "val_loss" in text
    best = Net.load_from_checkpoint(f"{store.logs_path(model.getRunId())}/checkpoints/best.ckpt", map_location="cpu")
    assert best.factor == 0.5


class Worse(Net):
    """Its validation says that the second epoch was the best."""

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.log("score", -abs(self.current_epoch - 1.0), sync_dist=True)


def test_best_weights(df: DataFrame, estimator: Callable[..., LightningEstimator]) -> None:
    torch.manual_seed(0)
    options = {"validation": 0.2, "monitor": "score", "monitor_mode": "max"}
    best = estimator(model=Worse(), restore_best_weights=True, **options).fit(df)
    torch.manual_seed(0)
    second = estimator(model=Worse(), epochs=2, **options).fit(df)
    assert column(best, "score") == [-1.0, 0.0, -1.0]
    assert all(torch.equal(value, weights(second)[name]) for name, value in weights(best).items())


def test_averaged_weights(df: DataFrame, estimator: Callable[..., LightningEstimator]) -> None:
    """What is validated are the averages, so they are what comes out; here they stay what the first step made."""
    fit = partial(estimator, model=net(), validation=0.2)
    first = fit(epochs=1, trainer_args={"limit_train_batches": 1}).fit(df)
    ended = fit(callbacks=[EMAWeightAveraging(decay=1.0)]).fit(df)
    best = fit(callbacks=[EMAWeightAveraging(decay=1.0)], restore_best_weights=True).fit(df)
    for model in (ended, best):
        assert all(torch.equal(value, weights(first)[name]) for name, value in weights(model).items())
    assert len(set(column(ended, "val_loss"))) == 1
    assert column(ended, "loss")[-1] < column(ended, "loss")[0]


class Ranked(Net):
    """Logs what differs between ranks."""

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.log("rank", float(self.global_rank), on_epoch=True)
        self.log("total", float(self.global_rank + 1), on_epoch=True, sync_dist=True, reduce_fx="sum")
        if self.global_rank == 0:
            self.log("mine", 7.0, rank_zero_only=True)
        self.log("rows", float(len(batch["y"])), on_epoch=True, reduce_fx="max")
        self.log("one", 1.0, on_epoch=True, sync_dist=True)
        return self.loss(batch)


def test_metrics_of_ranks(df: DataFrame, estimator: Callable[..., LightningEstimator]) -> None:
    row = estimator(model=Ranked(), epochs=1, batch_size=20).fit(df).getHistory()[0]
    assert row["rank"] == 0.5
    assert row["mine"] == 7.0
    assert row["total"] == 3.0 * 10  # the sum over ranks and batches
    assert row["one"] == 1.0
    assert row["rows"] == 20.5  # the last batch of the first rank holds the odd row


class Gan(L.LightningModule):
    """Two optimizers that take turns; returns no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = nn.Linear(1, 1), nn.Linear(1, 1)

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        return self.critic(self.generator(y.unsqueeze(1)))

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        real = batch["y"].unsqueeze(1)
        for number, (optimizer, sign) in enumerate(zip(self.optimizers(), (-1.0, 1.0), strict=True)):
            self.toggle_optimizer(optimizer)
            made = self.generator(torch.ones_like(real))
            loss = sign * (self.critic(made) - self.critic(real)).mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            self.log(f"loss_{number}", loss)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.01) for part in (self.generator, self.critic)]


def test_manual_optimization(df: DataFrame, estimator: Callable[..., LightningEstimator]) -> None:
    torch.manual_seed(0)
    gan = Gan()
    store = mine_store(estimator)
    model = estimator(model=gan, feature_cols=["positive"], epochs=2, run_id="gan").fit(df)
    assert set(model.getHistory()[0]) == {"epoch", "loss_0", "loss_1", "lr", "seconds", "rows_per_second"}
    assert not torch.equal(weights(model)["generator.bias"], gan.generator.bias)
    # The gradient of the critic's bias is nought; that of its weight is the difference of means, the same on all ranks.
    assert torch.equal(weights(model)["critic.bias"], gan.critic.bias)
    assert not torch.equal(weights(model)["critic.weight"], gan.critic.weight)
    state = torch.load(store.checkpoint_path("gan"), weights_only=True)
    assert [row["epoch"] for row in state["history"]] == [1, 2]


class Counting(Net):
    """Logs how often its optimizer stepped, the norm of its gradients when it did, and what is autocast."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.log("before", nn.utils.get_total_norm([p.grad for p in self.parameters()]), on_epoch=True, reduce_fx="max")

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
        super().optimizer_step(epoch, batch_idx, optimizer, closure)
        self.log("after", nn.utils.get_total_norm([p.grad for p in self.parameters()]), on_epoch=True, reduce_fx="max")

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.log("half", float(self(batch["features"]).dtype == torch.bfloat16))
        self.log("batches", 1.0, on_step=False, on_epoch=True, reduce_fx="sum")
        return self.loss(batch)

    def on_train_epoch_end(self) -> None:
        self.log("steps", float(self.global_step))


def test_profiler_and_other_files(df: DataFrame, estimator: Callable[..., LightningEstimator]) -> None:
    model = estimator(model=net(), epochs=1, profiler="simple", logger=None, random_seed=2**40).fit(df)
    store = mine_store(estimator)
    assert logs(store, model) == {
        "fit-profile-0.txt",
        "fit-profile-1.txt",
        "version_0/hparams.yaml",
        "version_0/metrics.csv",
    }
    assert "run_training_batch" in (Path(store.logs_path(model.getRunId())) / "fit-profile-0.txt").read_text()


def test_trainer_args(df: DataFrame, estimator: Callable[..., LightningEstimator]) -> None:
    arguments = {
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 0.125,
        "precision": "bf16-mixed",
        "limit_train_batches": 5,
    }
    torch.manual_seed(0)
    rows = estimator(model=Counting(), trainer_args=arguments, epochs=2).fit(df).getHistory()
    assert [row["batches"] for row in rows] == [5.0, 5.0]
    assert [row["steps"] for row in rows] == [3.0, 6.0]  # 2 + 2 + the odd one
    assert [row["half"] for row in rows] == [1.0, 1.0]
    assert rows[0]["before"] > 0.125
    assert [row["after"] for row in rows] == pytest.approx([0.125, 0.125], rel=1e-3)
    # Lightning halves what training_step returns for the two batches of a step; the history does not show that.
    assert rows[0]["loss"] == pytest.approx(14.0, rel=0.5)


def test_shapes_and_dtypes(df: DataFrame, estimator: Callable[..., LightningEstimator]) -> None:
    class Shapes(Net):
        def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            assert {name: (t.shape[1:], t.dtype) for name, t in batch.items()} == {
                "features": ((2, 2), torch.float64),
                "positive": ((), torch.int64),
                "y": ((), torch.float32),
            }
            return self.layers(batch["features"].float().flatten(1)).square().mean()

    estimator(
        model=Shapes(),
        task="multiclass",
        label_cols=["positive"],
        sample_weight_col="y",
        input_shapes=[[-1, 2, 2]],
        input_dtypes=["float64"],
        epochs=1,
    ).fit(df)


def test_columns_of_transform_are_named(df: DataFrame, estimator: Callable[..., LightningEstimator]) -> None:
    named = {"output_cols": ["out"], "prediction_col": "value", "raw_prediction_col": "", "probability_col": ""}
    model = estimator(model=net(), task="regression", epochs=1, **named).fit(df)
    assert set(model.transform(df).columns) - set(df.columns) == {"out", "value"}


def test_saved_and_loaded(df: DataFrame, estimator: Callable[..., LightningEstimator], tmp_path: Path) -> None:
    model = estimator(model=net(), task="regression", epochs=1).fit(df)
    model.write().save(str(tmp_path / "model"))
    loaded = LightningModel.load(str(tmp_path / "model"))
    assert isinstance(loaded, LightningModel)
    assert all(torch.equal(value, weights(loaded)[name]) for name, value in weights(model).items())
    before, after = (m.transform(df).select("prediction", "y__output").collect() for m in (model, loaded))
    assert before == after


def test_other_package(df: DataFrame, estimator: Callable[..., LightningEstimator]) -> None:
    pytorch_lightning = pytest.importorskip("pytorch_lightning")

    class Other(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, features: torch.Tensor) -> torch.Tensor:
            return self.layer(features)

        def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
            return nn.functional.mse_loss(self(batch["features"]).squeeze(1), batch["y"])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    losses = column(estimator(model=Other()).fit(df), "loss")
    assert losses[-1] < 0.1 * losses[0]


class Breaking(Net):
    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        broken = self.trainer.world_size > 1 and self.global_rank == 1 and self.current_epoch == 1 and batch_idx == 2
        return self.loss(batch) * (float("nan") if broken else 1.0)


def test_not_finite_and_resumed(df: DataFrame, estimator: Callable[..., LightningEstimator]) -> None:
    def fit(model: type[Net], run_id: str, **options: Any) -> LightningModel:
        torch.manual_seed(0)
        callbacks = [EMAWeightAveraging(decay=0.9), ModelCheckpoint(save_top_k=-1)]
        return estimator(model=model(dropout=0.3), run_id=run_id, callbacks=callbacks, **options).fit(df)

    with pytest.raises(NotFiniteLossError, match="nan on rank 1 in epoch 2, batch 3 of 7"):
        fit(Breaking, "broken", backend=LocalBackend(2, verbose=0))
    unbroken, resumed = fit(Net, "whole"), fit(Net, "broken")
    for name, value in weights(unbroken).items():
        assert torch.equal(weights(resumed)[name], value), name
    for key in ("epoch", "loss", "lr"):
        assert column(resumed, key) == column(unbroken, key), key
    assert logs(mine_store(estimator), resumed) == logs(mine_store(estimator), unbroken)


# -- errors, all before any rank is started


class Odd(Net):
    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.layers(batch["features"][:, :3]).mean()


class Unused(Net):
    def __init__(self) -> None:
        super().__init__()
        self.forgotten = nn.Linear(2, 2)


class Unvalidated(L.LightningModule):
    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None: ...


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"loss": nn.MSELoss()}, TypeError, "'loss': a LightningModule has its own: in training_step"),
        ({"optimizer": torch.optim.SGD}, TypeError, "'optimizer': a LightningModule has its own: in configure_opt"),
        ({"model": nn.Linear(1, 1)}, TypeError, "Linear, not a LightningModule: give it to TorchEstimator"),
        ({"model": Net}, TypeError, "expected a LightningModule"),
        ({"profiler": "simpel"}, ValueError, "Did you mean 'simple'"),
        ({"task": "multi"}, ValueError, "'multiclass', 'binary' or 'regression'"),
        ({"callbacks": [object()]}, TypeError, r"is no lightning.pytorch.Callback"),
        ({"logger": "csv"}, TypeError, "expected a logger of Lightning"),
        ({"trainer_args": {"devices": 2}}, ValueError, "num_proc is the number of ranks"),
        ({"trainer_args": {"max_epochs": 2}}, ValueError, "give epochs= to the estimator"),
        ({"trainer_args": {"gradient_clip": 2}}, TypeError, "Did you mean 'gradient_clip_val'"),
        ({"trainer_args": {"gradient_clip_algorithm": "mean"}}, ValueError, "the Trainer does not take them"),
        ({"model": Unvalidated(), "validation": 0.1}, ValueError, "Unvalidated has no validation_step"),
        ({"model": Odd()}, ModelError, r"Odd.training_step failed(.|\n)*features: float32 \[32, 4\]"),
        ({"model": Net().float(), "input_shapes": [[-1, 3]]}, ModelError, "Change input_shapes"),
        ({"model": Unused()}, ModelError, "2 parameters .* 'forgotten.weight', .*find_unused_parameters=True"),
    ],
)
def test_errors(
    df: DataFrame, estimator: Callable[..., LightningEstimator], options: dict[str, Any], error: type, text: str
) -> None:
    with pytest.raises(error, match=text):
        estimator(**{"model": net(), **options}).fit(df)
