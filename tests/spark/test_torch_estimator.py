"""TorchEstimator computes the same as a loop in one process, whatever the options."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import ExponentialLR

import spark_hvd.torch as hvd
from spark_hvd.estimators import LocalBackend, Store, TorchEstimator
from tests.spark.estimator_support import ROWS, Watched, frame, linear, means, numbers, reference, same
from tests.spark.estimator_support import ordered as estimator

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

cloudpickle.register_pickle_by_value(sys.modules[__name__])

FEATURES, VALUE, LATE = (torch.from_numpy(array) for array in numbers())


@pytest.fixture(scope="module")
def df(spark: SparkSession) -> DataFrame:
    return frame(spark).cache()


def mse(model: nn.Module, rows: slice) -> torch.Tensor:
    return functional.mse_loss(model(FEATURES[rows])[:, 0], VALUE[rows])


def test_two_ranks_do_what_one_process_would(df: DataFrame) -> None:
    model = linear()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fitted = estimator(model).fit(df)
    same(fitted.getModel(), reference(mse))  # 0.05 times two ranks is the reference's 0.1
    same(model, before, 1e-12)  # the passed model is not touched
    history = fitted.getHistory()
    assert [row["epoch"] for row in history] == [1, 2]
    assert history[0]["lr"] == pytest.approx(0.1)
    assert fitted.getOptimizer().param_groups[0]["lr"] == pytest.approx(0.05)


def test_history_is_the_mean_over_all_rows(df: DataFrame) -> None:
    def error(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return (output - label).abs().mean()

    frozen = estimator(
        optimizer=lambda params: torch.optim.SGD(params, lr=0.0),
        metrics=[error],
        batch_size=50,
        epochs=1,
        validation="held",
    )
    row = frozen.fit(df).getHistory()[0]
    held = np.arange(ROWS) % 4 == 0
    with torch.no_grad():
        off = linear()(FEATURES)[:, 0] - VALUE
    assert row["loss"] == pytest.approx(off[~held].square().mean().item(), rel=1e-5)
    assert row["val_loss"] == pytest.approx(off[held].square().mean().item(), rel=1e-5)
    assert row["error"] == pytest.approx(off[~held].abs().mean().item(), rel=1e-5)
    assert row["val_error"] == pytest.approx(off[held].abs().mean().item(), rel=1e-5)


def test_history_as_frame_and_plot(df: DataFrame) -> None:
    fitted = estimator(validation=0.3).fit(df)
    history = fitted.getHistory()
    table = history.to_pandas()
    assert isinstance(table, pd.DataFrame)
    assert list(table.index) == [1, 2]
    assert table["val_loss"].is_monotonic_decreasing
    axes = history.plot(["loss"]).axes[0]
    assert [line.get_label() for line in axes.lines] == ["training", "validation"]
    assert axes.lines[0].get_ydata().tolist() == table["loss"].tolist()
    assert [len(line.get_xdata()) for line in fitted.plot_loss(["loss"]).axes[0].lines] == [2, 2]


@pytest.mark.parametrize("num_proc", [1, 2])
@pytest.mark.slow
def test_same_seed_same_bytes(df: DataFrame, num_proc: int) -> None:
    def fit(seed: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.3), nn.Linear(8, 1))
        trained = estimator(model, shuffle=True, num_proc=num_proc, random_seed=seed, validation=0.2).fit(df)
        return dict(trained.getModel().state_dict())

    first, second, other = fit(5), fit(5), fit(6)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["0.weight"], other["0.weight"])


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "optimizer without lr, loss made in the rank, cached in memory": (
        {"optimizer": lambda params: torch.optim.Rprop(params), "scale_lr": False, "inmemory_cache_all": True}
        | {"loss": None, "loss_constructors": [lambda: nn.MSELoss()]},
        {"optimizer": torch.optim.Rprop},
    ),
    "unscaled, two passes a step, clipped norm": (
        {"scale_lr": False, "optimizer": sgd, "backward_passes_per_step": 2, "gradient_clip_norm": 0.1},
        {"passes": 2, "before_step": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1)},
    ),
    "batch that does not divide, clipped value, function as loss": (
        {"batch_size": 17, "gradient_clip_value": 0.05, "loss": functional.mse_loss},
        {"batch": 17, "before_step": lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.05)},
    ),
    "optimizer instance, three passes, one left": (
        {"optimizer": "instance", "backward_passes_per_step": 3, "batch_size": 30},
        {"passes": 3, "batch": 30},
    ),
    "one rank": ({"num_proc": 1, "optimizer": sgd}, {"ranks": 1}),
}


# By day, an instance is below, and one rank in test_dtypes_asked.py.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if at > 2 else ()) for at, name in enumerate(OPTIONS)]
)
def test_options_compute_what_they_say(df: DataFrame, name: str) -> None:
    given, expected = OPTIONS[name]
    model = linear()
    if given.get("optimizer") == "instance":
        given = {**given, "optimizer": torch.optim.SGD(model.parameters(), lr=0.05)}
    fitted = estimator(model, **given).fit(df).getModel()
    same(fitted, reference(mse, **expected))
    for option in expected:  # each of them must have an effect
        others = {other: value for other, value in expected.items() if other != option}
        with pytest.raises(AssertionError):
            same(fitted, reference(mse, **others))


def test_parameter_groups_of_an_instance(df: DataFrame) -> None:
    def groups(model: nn.Module, factor: float) -> torch.optim.Optimizer:
        parts = [{"params": [model.weight], "lr": 0.02 * factor}, {"params": [model.bias], "weight_decay": 0.3}]
        return torch.optim.SGD(parts, lr=0.05 * factor, momentum=0.9)

    model, twin = linear(), linear()
    fitted = estimator(model, optimizer=groups(model, 1)).fit(df)
    same(fitted.getModel(), reference(mse, twin, optimizer=lambda _: groups(twin, 2)))
    assert [group["lr"] for group in fitted.getOptimizer().param_groups] == pytest.approx([0.02, 0.05])


@pytest.mark.parametrize(("interval", "as_instance"), [("epoch", True), ("step", False)])
def test_learning_rate_schedule(df: DataFrame, interval: str, as_instance: bool) -> None:
    def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    model = linear()
    given: dict[str, Any] = {"lr_scheduler": halving}
    if as_instance:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        given = {"optimizer": optimizer, "lr_scheduler": halving(optimizer)}
    fitted = estimator(model, **given, lr_scheduler_interval=interval).fit(df)

    def halve(optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["lr"] /= 2

    made: list[torch.optim.Optimizer] = []

    def kept(params: Any) -> torch.optim.Optimizer:
        made.append(sgd(params))
        return made[0]

    each = {"after_step": halve} if interval == "step" else {"after_epoch": lambda: halve(made[0])}
    same(fitted.getModel(), reference(mse, optimizer=kept, **each))
    rates = [row["lr"] for row in fitted.getHistory()]
    assert rates == pytest.approx([0.1, 0.05] if interval == "epoch" else [0.1, 0.1 / 2**8])


def test_plateau_scheduler_looks_at_the_monitored_value(df: DataFrame) -> None:
    fitted = estimator(
        optimizer=lambda params: torch.optim.SGD(params, lr=0.0),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
        epochs=4,
    ).fit(df)
    assert len(fitted.getHistory()) == 4


def test_sample_weights_multiply_the_loss_of_a_row(df: DataFrame) -> None:
    weights = torch.arange(ROWS) % 3

    def weighted(model: nn.Module, rows: slice) -> torch.Tensor:
        return (functional.mse_loss(model(FEATURES[rows])[:, 0], VALUE[rows], reduction="none") * weights[rows]).mean()

    same(estimator(sample_weight_col="weight", loss=functional.mse_loss).fit(df).getModel(), reference(weighted))


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.value, self.late = nn.Linear(3, 1), nn.Linear(4, 1)

    def forward(self, features: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        both = torch.cat([features, (row[:, None] % 2).float()], dim=1)
        return self.value(features), self.late(both)


def test_several_inputs_and_outputs(df: DataFrame) -> None:
    def both(model: nn.Module, rows: slice) -> torch.Tensor:
        value, late = model(FEATURES[rows], torch.arange(ROWS)[rows])
        first = functional.mse_loss(value[:, 0], VALUE[rows])
        return 0.25 * first + 0.75 * functional.binary_cross_entropy_with_logits(late[:, 0], LATE[rows])

    def distance(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return (output - label).abs()

    fitted = estimator(
        TwoHeads(),
        feature_cols=["features", "row"],
        label_cols=["value", "late"],
        loss=[nn.MSELoss(), nn.BCEWithLogitsLoss()],
        loss_weights=[0.25, 0.75],
        metrics=[[distance], []],
    ).fit(df)
    same(fitted.getModel(), reference(both, TwoHeads()))
    assert "value_distance" in fitted.getHistory()[0]
    row = fitted.transform(df).select("row", "value__output", "late__output").orderBy("row").first()
    with torch.no_grad():
        value, late = fitted.getModel()(FEATURES[:1], torch.arange(1))
    assert row["value__output"] == pytest.approx(value.item(), rel=1e-5)
    assert row["late__output"] == round(late.item())  # as an int, like the label


def logits_loss(model: nn.Module) -> Any:
    return functional.binary_cross_entropy_with_logits


def test_a_loss_of_logits_made_in_the_rank_with_boolean_labels(df: DataFrame) -> None:
    """The driver creates it, too: labels become float, and scores above 0 are true."""
    rows = df.selectExpr("features", "late > 0 as late")
    fitted = estimator(label_cols=["late"], loss=None, loss_constructors=[logits_loss], epochs=1).fit(rows)
    found = fitted.transform(rows).select("late__output", "rawPrediction", "prediction").collect()
    assert {(row[0], row[2]) for row in found} == {(False, 0.0), (True, 1.0)}
    assert all(row[0] == (row[1][1] > 0) for row in found)


def test_stacked_features_are_one_argument(df: DataFrame, tmp_path: Path) -> None:
    columns = [df["features"][i].alias(f"f{i}") for i in (0, 1, 2)]
    split = df.select("row", "value", *columns)
    fitted = estimator(feature_cols=["f0", "f1", "f2"], stack_features=True).fit(split)
    same(fitted.getModel(), reference(mse))
    fitted.save(str(tmp_path / "model"))
    with torch.no_grad():
        expected = fitted.getModel()(FEATURES)[:, 0].tolist()
    model = type(fitted).load(str(tmp_path / "model"))
    found = [row[0] for row in model.transform(split).orderBy("row").select("value__output").collect()]
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_a_list_and_a_number_are_stacked(df: DataFrame) -> None:
    split = df.select("value", df["features"][0].alias("f0"), df["features"].alias("all"))
    wider = estimator(nn.Linear(4, 1), feature_cols=["all", "f0"], stack_features=True).fit(split)
    assert wider.getModel().weight.shape == (1, 4)


def test_class_numbers_as_double_become_integers(df: DataFrame) -> None:
    classes = df.withColumn("late", df["late"].cast("double"))
    fitted = estimator(linear(2), label_cols=["late"], loss=nn.CrossEntropyLoss(), epochs=6).fit(classes)

    def entropy(model: nn.Module, rows: slice) -> torch.Tensor:
        return functional.cross_entropy(model(FEATURES[rows]), LATE[rows].long())

    same(fitted.getModel(), reference(entropy, linear(2), epochs=6))


def test_own_minibatch_function(df: DataFrame) -> None:
    def twice_the_loss(model: Any, optimizer: Any, inputs: Any, labels: Any, transform_outputs: Any) -> Any:
        optimizer.zero_grad()
        outputs, labels = transform_outputs([model(*inputs)], labels)
        loss = 2 * functional.mse_loss(outputs[0], labels[0])
        loss.backward()
        optimizer.step()
        return outputs, loss

    decayed = {"lr_scheduler": lambda each: ExponentialLR(each, 0.9), "lr_scheduler_interval": "step"}
    fitted = estimator(loss=None, train_minibatch_fn=twice_the_loss, **decayed).fit(df)

    def decay(optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["lr"] *= 0.9

    same(fitted.getModel(), reference(lambda model, rows: 2 * mse(model, rows), after_step=decay))
    with pytest.raises(ValueError, match=r"gradient_clip_norm=1\.0 has no effect with train_minibatch_fn"):
        estimator(loss=None, train_minibatch_fn=twice_the_loss, gradient_clip_norm=1.0).fit(df)


def test_transformation_in_the_ranks(df: DataFrame) -> None:
    def doubled(rows: pd.DataFrame) -> pd.DataFrame:
        return rows.assign(value=rows["value"] * 2)

    def doubled_loss(model: nn.Module, rows: slice) -> torch.Tensor:
        return functional.mse_loss(model(FEATURES[rows])[:, 0], 2 * VALUE[rows])

    same(estimator(transformation_fn=doubled).fit(df).getModel(), reference(doubled_loss))


def test_gradient_compression(df: DataFrame) -> None:
    exact = reference(mse)
    rounded = estimator(gradient_compression=hvd.Compression.bf16).fit(df).getModel()
    same(rounded, exact, 0.02)
    with pytest.raises(AssertionError):
        same(rounded, exact, 1e-7)


def test_bf16_computes_in_bf16(df: DataFrame) -> None:
    class Spy(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            assert not self.training or torch.is_autocast_enabled("cpu") == (torch.distributed.is_initialized())
            return y

    model = Spy(3, 1)
    model.load_state_dict(linear().state_dict())
    same(estimator(model, precision="bf16").fit(df).getModel(), reference(mse), 0.05)


def test_steps_overridden_on_data_that_are_written_once(df: DataFrame, tmp_path: Path) -> None:
    store = Store.create(tmp_path)
    few = estimator(train_steps_per_epoch=3, epochs=1, store=store).fit(df)
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.parquet")}
    assert files

    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(2):
            start = step * 32 + rank * 16
            (mse(model, slice(start, start + 16)) / 2).backward()
        optimizer.step()
    same(few.getModel(), dict(model.state_dict()))
    # 8 batches are a pass; two epochs of 4 are one pass
    same(estimator(train_steps_per_epoch=4, store=store).fit(df).getModel(), reference(mse, epochs=1))
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.parquet")} == files


def test_image_bytes_with_a_decoder(spark: SparkSession) -> None:
    pixels = np.arange(ROWS * 3, dtype="uint8").reshape(ROWS, 3)
    rows = [(pixels[i].tobytes(), float(pixels[i].sum())) for i in range(ROWS)]
    df = spark.createDataFrame(rows, "image binary, value double").coalesce(1)

    def decode(data: bytes) -> np.ndarray:
        return np.frombuffer(data, "uint8").astype("float32") / 255

    features, value = torch.from_numpy(pixels.astype("float32") / 255), torch.from_numpy(pixels.sum(1)).float()
    slow = {"optimizer": lambda params: torch.optim.SGD(params, lr=0.001), "epochs": 1}
    fitted = estimator(feature_cols=["image"], decoders={"image": decode}, **slow).fit(df)
    expected = reference(
        lambda model, rows: functional.mse_loss(model(features[rows])[:, 0], value[rows]),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.002),
        epochs=1,
    )
    same(fitted.getModel(), expected, 1e-3)
    with torch.no_grad():
        wanted = fitted.getModel()(features)[:, 0]
    predicted = [row[0] for row in fitted.transform(df).select("value__output").collect()]
    assert predicted == pytest.approx(wanted.tolist(), rel=1e-4)


@pytest.mark.slow
def test_local_backend(df: DataFrame) -> None:
    fitted = estimator(num_proc=None, backend=LocalBackend(2, verbose=0)).fit(df)
    same(fitted.getModel(), reference(mse))


@pytest.mark.parametrize("reader", ["arrow", "petastorm"])
def test_fit_on_parquet(df: DataFrame, tmp_path: Path, reader: str) -> None:
    train, validation = str(tmp_path / "train"), str(tmp_path / "validation")
    df.drop("held").write.parquet(train)
    df.drop("held").limit(20).write.parquet(validation)
    backend, store = Watched(2, verbose=0), Store.create(tmp_path / "store")
    made = estimator(reader=reader, store=store, num_proc=None, backend=backend, metrics=[functional.l1_loss])
    fitted = made.fit_on_parquet(train, validation)
    same(fitted.getModel(), reference(mse))
    assert "val_loss" in fitted.getHistory()[0]
    assert backend.metrics == means(fitted.getHistory()[-1])


def test_table_is_the_one_source() -> None:
    made = TorchEstimator(batch_size=7)
    assert made.getBatchSize() == 7
    assert made.setBatchSize(8) is made
    assert made.getOrDefault(made.batch_size) == 8
    assert made.getEpochs() == 1
    assert "Rows of a batch" in made.explainParam("batch_size")
    assert made.copy({made.batch_size: 9}).getBatchSize() == 9
    assert made.getBatchSize() == 8
