"""LightningEstimator's training as a user sees it: weights, history, where a resumed fit continues."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import lightning as L  # noqa: N812 - the usual name
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, ModelCheckpoint
from pyspark.sql import functions as F  # noqa: N812
from torch import nn

from spark_hvd.estimators import (
    CheckpointError,
    LightningEstimator,
    LightningModel,
    LocalBackend,
    NotFiniteLossError,
    Store,
    TorchEstimator,
)
from tests.spark.lightning.support import Net, Warm, column, logs, mine_store, net, weights

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.mark.night
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
    assert rmse < 0.8  # leaves room for the order of rows, which is not fixed
    rows = model.getHistory()
    assert list(rows[0]) == ["epoch", "loss", "train_loss", "val_loss", "lr", "seconds", "rows_per_second"]
    assert [row["epoch"] for row in rows] == [1, 2, 3, 4, 5]
    assert rows[-1]["val_loss"] < rows[0]["val_loss"]
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


class Worse(Net):
    """Its validation reports the second epoch as the best."""

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


def test_an_epoch_has_its_own_validation_or_none(df: DataFrame, estimator: Callable[..., LightningEstimator]) -> None:
    """Lightning keeps the values of the previous epoch; and not every epoch has the monitored value."""
    options = {"validation": 0.2, "trainer_args": {"check_val_every_n_epoch": 2}, "epochs": 5}
    torch.manual_seed(0)
    best = estimator(model=Worse(), restore_best_weights=True, monitor="score", monitor_mode="max", **options).fit(df)
    assert [row.get("score") for row in best.getHistory()] == [None, -0.0, None, -2.0, None]
    torch.manual_seed(0)
    second = estimator(model=Worse(), **{**options, "epochs": 2}).fit(df)
    assert all(torch.equal(value, weights(second)[name]) for name, value in weights(best).items())


def test_averaged_weights(df: DataFrame, estimator: Callable[..., LightningEstimator]) -> None:
    """The averages are validated, so they are the result; here they stay as the first step left them."""
    fit = partial(estimator, model=net(), validation=0.2)
    first = fit(epochs=1, trainer_args={"limit_train_batches": 1}).fit(df)
    ended = fit(callbacks=[EMAWeightAveraging(decay=1.0)]).fit(df)
    best = fit(callbacks=[EMAWeightAveraging(decay=1.0)], restore_best_weights=True).fit(df)
    for model in (ended, best):
        assert all(torch.equal(value, weights(first)[name]) for name, value in weights(model).items())
    assert len(set(column(ended, "val_loss"))) == 1
    assert column(ended, "loss")[-1] < column(ended, "loss")[0]


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
    # The gradient of the critic's bias is zero; that of its weight is the difference of means, equal on all ranks.
    assert torch.equal(weights(model)["critic.bias"], gan.critic.bias)
    assert not torch.equal(weights(model)["critic.weight"], gan.critic.weight)
    state = torch.load(store.checkpoint_path("gan"), weights_only=True)
    assert [row["epoch"] for row in state["history"]] == [1, 2]


class Breaking(Net):
    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        broken = self.trainer.world_size > 1 and self.global_rank == 1 and self.current_epoch == 1 and batch_idx == 2
        return self.loss(batch) * (float("nan") if broken else 1.0)


class Searching(Net):
    """LBFGS evaluates the loss as often as the loss requires."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), max_iter=5, line_search_fn="strong_wolfe")


def test_lbfgs_decides_by_the_loss_of_all_rows(df: DataFrame, estimator: Callable[..., LightningEstimator]) -> None:
    torch.manual_seed(0)
    module = Searching()
    fitted = estimator(model=module, batch_size=df.count(), epochs=2).fit(df)
    columns = df.select("features", "y").toPandas()
    batch = {"features": torch.tensor(columns["features"].tolist()), "y": torch.tensor(columns["y"].to_numpy())}
    optimizer = module.configure_optimizers()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = module.loss(batch)
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    for name, weight in weights(fitted).items():
        torch.testing.assert_close(weight, module.state_dict()[name], rtol=1e-2, atol=1e-3)


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
    with pytest.raises(CheckpointError, match="another lr_scheduler: StepLR then, ExponentialLR now"):
        fit(Exponential, "broken", backend=LocalBackend(2, verbose=0), epochs=9)


class Exponential(Net):
    """Its scheduler would take the other one's state, and go on as that one."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


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
    ).fit(df.withColumn("y", F.abs("y")))


@pytest.mark.night
def test_stacked_features(df: DataFrame, estimator: Callable[..., LightningEstimator]) -> None:
    class Stacked(Net):
        def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            assert {name: t.shape[1:] for name, t in batch.items()} == {"features": (4,), "y": ()}
            return super().loss(batch)

    split = df.select("y", *(df["features"][i].alias(f"f{i}") for i in range(4)))
    model = estimator(
        model=Stacked(), task="regression", feature_cols=[f"f{i}" for i in range(4)], stack_features=True, epochs=1
    ).fit(split)
    assert model.transform(split).where("prediction is null").count() == 0


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


class SetsTwo(Net):
    """Its own hook is called after those of all callbacks."""

    def on_train_end(self) -> None:
        with torch.no_grad():
            for param in self.parameters():
                param.fill_(2.0)


def test_weights_that_a_module_sets_at_the_end(df: DataFrame, estimator: Callable[..., LightningEstimator]) -> None:
    fitted = estimator(model=SetsTwo(), epochs=1).fit(df)
    assert all(bool((value == 2.0).all()) for value in weights(fitted).values())
