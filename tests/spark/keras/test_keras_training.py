"""KerasEstimator on real ranks: trained and measured as by one rank, and what cannot be trained."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from spark_hvd.estimators import LocalBackend, ModelError
from spark_hvd.estimators.keras.estimator import _head_of, _heads_of
from spark_hvd.estimators.keras.measure import KerasMeasure
from spark_hvd.estimators.keras.module import Described
from spark_hvd.estimators.training.head import Head
from spark_hvd.world.pickles import dumps
from tests.spark.estimator_support import ROWS, frame, numbers
from tests.spark.keras.support import estimator, keras, net, predicted

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.slow


def test_it_trains_as_one_rank_on_the_joined_batches(df: DataFrame) -> None:
    model = net()
    start = model.get_weights()
    fitted = estimator(model, scale_lr=False, metrics=["mae"], validation="held", sample_weight_col="weight").fit(df)
    assert all(np.array_equal(one, two) for one, two in zip(start, model.get_weights(), strict=True))
    history = fitted.getHistory()
    assert {"loss", "mae", "val_loss", "val_mae"} <= history[0].keys()
    assert history[1]["loss"] < history[0]["loss"]
    features, value, _ = numbers()
    trained = fitted.getModel()
    assert isinstance(trained, keras.Model)
    np.testing.assert_allclose(predicted(fitted, df, "value__output"), trained.predict(features, verbose=0)[:, 0], 1e-4)
    np.testing.assert_allclose(predicted(fitted, df, "prediction"), predicted(fitted, df, "value__output"))

    alone = estimator(net(), scale_lr=False, backend=LocalBackend(1), batch_size=2 * ROWS, epochs=1).fit(df)
    reference = net()
    reference.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    reference.train_on_batch(features, value)
    two = estimator(net(), scale_lr=False, batch_size=ROWS // 2, epochs=1).fit(df)
    for one, both, wanted in zip(
        *(each.get_weights() for each in (alone.getModel(), two.getModel(), reference)), strict=True
    ):
        np.testing.assert_allclose(one, wanted, 1e-4, 1e-5)
        np.testing.assert_allclose(both, wanted, 1e-4, 1e-5)


def test_weights_of_samples_count(df: DataFrame) -> None:
    """Rows of weight 0 change nothing: h#3799."""
    changed = df.selectExpr("features", "IF(weight = 0, 100.0, value) AS value", "weight", "row")
    both = [estimator(net(), sample_weight_col="weight", epochs=1).fit(each) for each in (df, changed)]
    for one, two in zip(both[0].getModel().get_weights(), both[1].getModel().get_weights(), strict=True):
        np.testing.assert_allclose(one, two, 1e-5)


@pytest.mark.night
def test_rows_have_the_shape_of_the_models_input(df: DataFrame) -> None:
    """As in Horovod: a column of numbers is an image if the model takes images of as many numbers."""

    def images(rows: int) -> Any:
        layers = [keras.layers.Input((rows, 1)), keras.layers.Conv1D(2, 3), keras.layers.Flatten()]
        return keras.Sequential([*layers, keras.layers.Dense(1)])

    fitted = estimator(images(3), epochs=1).fit(df)
    features, _, _ = numbers()
    wanted = fitted.getModel().predict(features[..., None], verbose=0)[:, 0]
    np.testing.assert_allclose(predicted(fitted, df, "prediction"), wanted, 1e-4)
    with pytest.raises(ModelError, match="a step of training failed"):
        estimator(images(4), epochs=1).fit(df)


@pytest.mark.night
def test_the_history_has_the_means_of_epochs(df: DataFrame) -> None:
    """And not the last batch's: the model does not change, so they are those of all rows."""
    fitted = estimator(net(), optimizer=keras.optimizers.SGD(0.0), metrics=["mae"], epochs=1).fit(df)
    features, value, _ = numbers()
    errors = fitted.getModel().predict(features, verbose=0)[:, 0] - value
    (row,) = fitted.getHistory()
    np.testing.assert_allclose([row["loss"], row["mae"]], [np.mean(errors**2), np.mean(np.abs(errors))], 1e-4)


@pytest.mark.parametrize("weights", [None, "weight"])
def test_metrics_are_those_of_all_rows(spark: SparkSession, weights: str | None) -> None:
    """Even metrics that are not means over rows, with ranks that differ in rows and weights: as in one process."""
    features, _, late = numbers(501)
    held = np.arange(501) % 4 == 0
    weight = np.arange(501) % 3 if weights else None
    fitted = estimator(
        net(activation="sigmoid"),
        optimizer=keras.optimizers.SGD(0.0),
        loss="binary_crossentropy",
        metrics=["mae", keras.metrics.AUC(name="auc"), keras.metrics.Precision(name="p"),
                 keras.metrics.RootMeanSquaredError(name="rmse")],
        label_cols=["late"],
        sample_weight_col=weights,
        validation="held",
        epochs=1,
    ).fit(frame(spark, 501))  # fmt: skip
    (row,) = fitted.getHistory()
    model = fitted.getModel()
    measured = [keras.metrics.MeanAbsoluteError(name="mae"), keras.metrics.AUC(name="auc"),
                keras.metrics.Precision(name="p"), keras.metrics.RootMeanSquaredError(name="rmse")]  # fmt: skip
    model.compile(loss="binary_crossentropy", **{"weighted_metrics" if weights else "metrics": measured})
    for prefix, taken in (("", ~held), ("val_", held)):
        share = None if weight is None else weight[taken]
        wanted = model.evaluate(features[taken], late[taken], 501, 0, share, return_dict=True)
        assert {name: row[prefix + name] for name in wanted} == pytest.approx(wanted, rel=1e-4)


def ignoring() -> Any:
    """A loss that is 0 for a class, but still the mean over all elements."""

    class Ignoring(keras.losses.Loss):  # type: ignore[misc, name-defined] # imported late
        ignore_class = -1

        def call(self, y_true: Any, y_pred: Any) -> Any:
            loss = keras.ops.sparse_categorical_crossentropy(keras.ops.maximum(y_true, 0), y_pred, from_logits=True)
            return keras.ops.where(y_true == self.ignore_class, 0.0, loss)

    return Ignoring(name="ignoring")


def test_a_loss_divides_by_the_elements_that_masks_leave(spark: SparkSession) -> None:
    """Ranks have other numbers of elements: padding, and a class that is ignored. The step is that of one process."""
    generator = np.random.default_rng(0)
    ids = generator.integers(1, 9, (48, 6))
    for row in range(48):  # every second row, those of the second rank among them, is mostly padding
        ids[row, 1 if row // 8 % 2 else generator.integers(3, 7) :] = 0
    value, known = np.sin(ids).astype("float32"), ids % 3
    kind = np.where(generator.random(ids.shape) < 0.3, -1, ids % 3)
    data = [tuple(each[row].tolist() for each in (ids, value, kind, known, kind)) for row in range(48)]
    columns = "ids array<int>, value array<float>, kind array<int>, known array<int>, mine array<int>"
    df = spark.createDataFrame(data, columns).coalesce(1)

    def model() -> Any:
        keras.utils.set_random_seed(3)
        dense, given = keras.layers.Dense, keras.Input((6,), dtype="int32")
        embedded, unmasked = (keras.layers.Embedding(9, 4, mask_zero=masked)(given) for masked in (True, False))
        softmax = dense(3, "softmax", name="known")(embedded)
        outputs = [dense(1, name="value")(embedded), dense(3, name="kind")(embedded), softmax]
        return keras.Model(given, [*outputs, dense(3, name="mine")(unmasked)])

    class Shown(keras.callbacks.Callback):  # type: ignore[misc, name-defined] # imported late
        """Compares the losses within an epoch with those of one process, or takes them."""

        def __init__(self, *wanted: Any) -> None:
            super().__init__()
            self.wanted, self.shown = wanted, list[Any]()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.shown.append([logs[f"{name}_loss"] for name in ("value", "kind", "known")])
            if self.wanted:
                np.testing.assert_allclose(self.shown[-1], self.wanted[len(self.shown) - 1], 1e-5)

    sparse = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1)
    losses, alone, one = ["mse", sparse, "ce", ignoring()], model(), Shown()
    alone.compile(keras.optimizers.SGD(0.1), losses)
    labels = [value[..., None], kind, known, kind]
    wanted = alone.fit(ids, labels, 16, 2, 0, [one], shuffle=False).history["loss"]
    assert len(one.shown) == 6
    fitted = estimator(
        model(), loss=losses, feature_cols=["ids"], label_cols=["value", "kind", "known", "mine"], scale_lr=False,
        label_shapes=[[-1, 6, 1], None, None, None], optimizer=keras.optimizers.SGD(0.1), batch_size=8,
        callbacks=[Shown(*one.shown)],
    ).fit(df)  # fmt: skip
    assert [row["loss"] for row in fitted.getHistory()] == pytest.approx(wanted, rel=1e-5)
    for mine, theirs in zip(fitted.getModel().get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, 1e-4, 1e-6)


def test_a_metric_that_is_no_number_is_refused_before_ranks_start(df: DataFrame) -> None:
    f1 = keras.metrics.F1Score(average=None, name="f1")
    with pytest.raises(ModelError, match=r"metric 'f1' has a value of shape \(3,\).*average='macro'"):
        estimator(net(3, "sigmoid"), metrics=[f1], label_cols=["features"]).fit(df)


def test_a_loss_that_is_no_mean_over_rows_is_refused(df: DataFrame) -> None:
    with pytest.raises(ModelError, match="reduction='sum', but several ranks"):
        estimator(net(), loss=keras.losses.MeanSquaredError(reduction="sum")).fit(df)


@pytest.mark.night
def test_classes(df: DataFrame) -> None:
    sparse = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    cases = [
        (net(1, "sigmoid"), "binary_crossentropy"),
        (net(2, "softmax"), "sparse_categorical_crossentropy"),
        (net(2), sparse),
    ]
    for model, loss in cases:
        params = {"optimizer": keras.optimizers.Adam(0.05), "metrics": ["accuracy"], "epochs": 5}
        fitted = estimator(model, loss=loss, label_cols=["late"], **params).fit(df)
        assert fitted.getHistory()[-1]["accuracy"] > 0.8
        found = predicted(fitted, df, "probability")
        np.testing.assert_allclose(found.sum(1), 1)
        assert (predicted(fitted, df, "prediction") == found.argmax(1)).all()
        if model.layers[-1].activation.__name__ != "linear":
            given = fitted.getModel().predict(numbers()[0], verbose=0)
            np.testing.assert_allclose(found[:, -1], given[:, -1], rtol=1e-4, atol=1e-6)


def scaled(factor: float) -> Any:
    """A loss whose from_config removes from its config what it reads, as many do."""

    class Scaled(keras.losses.MeanSquaredError):  # type: ignore[misc, name-defined] # imported late
        def __init__(self, factor: float = 1.0) -> None:
            super().__init__(name="scaled")
            self.factor = factor

        def call(self, y_true: Any, y_pred: Any) -> Any:
            return self.factor * super().call(y_true, y_pred)

        def get_config(self) -> dict[str, Any]:
            return {"factor": self.factor}

        @classmethod
        def from_config(cls, config: dict[str, Any]) -> Any:
            return cls(config.pop("factor", 1.0))

    return Scaled(factor)


def test_what_is_in_no_config_of_keras_reaches_the_ranks(df: DataFrame) -> None:
    """The loss is scaled for half precision, biases do not decay, and a config stays the same when read again."""
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        models = [net(), net()]
    finally:
        keras.config.set_dtype_policy(policy)
    start = [np.full(each.shape, 0.5, "float32") if each.ndim == 1 else each for each in models[0].get_weights()]

    def adamw() -> Any:
        made = keras.optimizers.AdamW(0.1, weight_decay=1.0)
        made.exclude_from_weight_decay(var_names=["bias"])
        return made

    for model in models:
        model.set_weights(start)
    models[1].compile(adamw(), scaled(1e-7))
    features, value, _ = numbers()
    models[1].fit(features, value, ROWS, 3, shuffle=False, verbose=0)
    alone = {"backend": LocalBackend(1), "batch_size": ROWS, "epochs": 3, "scale_lr": False}
    fitted = estimator(models[0], optimizer=adamw(), loss=scaled(1e-7), **alone).fit(df).getModel()
    for before, one, wanted in zip(start, fitted.get_weights(), models[1].get_weights(), strict=True):
        np.testing.assert_allclose(one - before, wanted - before, 0.05, 1e-4)
        assert np.abs(wanted - before).max() > 1e-3


def test_ranks_skip_the_steps_that_one_process_skips(tmp_path: Path) -> None:
    """The loss scale halves when the gradient of all rows overflows float16, and not when that of one rank would.

    Keras on torch multiplies weights by the mask of a loss in place: in one batch, which is not used again.
    """
    features, value, _ = numbers(70)
    kind, weight = np.digitize(value, [-1, 1]), (15.0 * (1 + np.arange(70) % 3)).astype("float32")
    table = {"features": pa.array(features.tolist(), pa.list_(pa.float32())), "value": kind, "weight": weight}
    parquet.write_table(pa.table(table), tmp_path / "rows.parquet")
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        models = [net(3), net(3)]
    finally:
        keras.config.set_dtype_policy(policy)
    models[1].set_weights(models[0].get_weights())
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=1)
    models[1].compile(keras.optimizers.SGD(0.02, momentum=0.9), loss)
    wanted = models[1].fit(features, kind, 32, 3, shuffle=False, verbose=0, sample_weight=weight).history["loss"]
    assert models[1].optimizer.dynamic_scale < models[1].optimizer.initial_scale
    fitted = estimator(
        models[0], loss=loss, sample_weight_col="weight", optimizer=keras.optimizers.SGD(0.02, momentum=0.9),
        batch_size=16, epochs=3, scale_lr=False, store=str(tmp_path),
    ).fit_on_parquet(str(tmp_path / "rows.parquet"))  # fmt: skip
    np.testing.assert_allclose([row["loss"] for row in fitted.getHistory()], wanted, 0.01)
    for mine, theirs in zip(fitted.getModel().get_weights(), models[1].get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, 0.01, 0.002)


def test_an_optimizer_of_a_notebook_whose_loss_is_scaled() -> None:
    """Its reported name and its class are those of the inner optimizer."""

    class Own(keras.optimizers.SGD):  # type: ignore[misc, name-defined] # Any
        pass

    described = Described.of(keras.optimizers.LossScaleOptimizer(Own(0.25)))
    assert list(described.own.values()) == [Own]
    assert type(Described.made(described, {}).inner_optimizer) is Own
    plan: Any = SimpleNamespace(objects=SimpleNamespace(optimizer=described))
    facts = estimator(net())._optimizer_facts(plan)
    assert facts["opt_learning_rate"] == 0.25
    assert "opt_inner_optimizer" not in facts


def test_arguments_of_losses_and_metrics_that_are_in_no_config_of_keras() -> None:
    """Keras serializes neither Huber's delta nor the axis of a cosine."""
    label, output = np.array([[0.0, 3.0], [0.0, 4.0]]), np.array([[4.0, 3.0], [0.0, 0.0]])
    given = {"huber": keras.losses.Huber(0.25), "cosine": [keras.metrics.CosineSimilarity(axis=0)]}
    described = pickle.loads(dumps(Described.of(given)))
    made = Described.made(described, {})
    assert float(made["huber"](label, output)) == pytest.approx(0.25 * (4 - 0.125) / 2)
    assert float(made["cosine"][0](label, output)) == pytest.approx(0.6 / 2)
    older = Described.of(keras.losses.Huber(0.25))
    del vars(older)["arguments"]
    assert isinstance(Described.made(pickle.loads(dumps(older)), {}), keras.losses.Huber)


def test_a_checkpoint_describes_optimizers_without_a_learning_rate() -> None:
    from spark_hvd.estimators.keras.loop import _described

    sgd = keras.saving.serialize_keras_object(keras.optimizers.SGD(0.25))
    scaled = {"class_name": "LossScaleOptimizer", "config": {"inner_optimizer": sgd}}
    for config, name, options in [
        (scaled, "SGD", {"learning_rate": 0.25}),
        ({"class_name": "Mine", "config": {"momentum": 0.9}}, "Mine", {}),
        ({"class_name": "Lookahead", "config": {"inner_optimizer": "sgd", "learning_rate": "mine"}}, "Lookahead", {}),
    ]:
        found = _described(config, ["w"])
        assert (found["optimizer"], found["options"], found["lr_scheduler"]) == (name, [options], None)


def test_heads_are_those_of_the_outputs_by_name() -> None:
    losses = {"b": keras.losses.BinaryCrossentropy(from_logits=True), "a": "MSE"}
    assert _heads_of(losses, ["a", "b", "c"]) == (Head("regression"), Head("binary", "logits"), Head("other"))
    for name in ("MSE", "mape", "log_cosh", "poisson", keras.losses.MeanAbsolutePercentageError()):
        assert _head_of(name) == Head("regression")
    assert _head_of("bce") == Head("binary", "probabilities")

    def mse(label: Any, output: Any) -> Any:
        return keras.ops.mean((label - output) ** 2)

    assert _head_of(mse) == Head("regression")


def test_a_metric_may_differ_in_its_last_bit_from_what_a_graph_logs() -> None:
    model = SimpleNamespace(metrics_variables=[], get_metrics_result=lambda: {"r2": 1.2345e-5, "own": 0.5})
    fit: Any = SimpleNamespace(model=model)
    assert KerasMeasure.measured(fit, 3, {"r2": 1.2405e-5, "own": 0.4})["own"] == ["r2"]


def test_labels_of_outputs_by_name_are_a_dict(df: DataFrame) -> None:
    """So that losses, their weights and metrics may be one, as Keras wants it."""

    def model() -> Any:
        keras.utils.set_random_seed(3)
        given = keras.Input((3,))
        hidden = keras.layers.Dense(4, "tanh")(given)
        outputs = {"value": keras.layers.Dense(1)(hidden), "late": keras.layers.Dense(1, "sigmoid")(hidden)}
        return keras.Model(given, outputs)

    losses, shares, alone = {"value": "mse", "late": "bce"}, {"value": 0.5, "late": 2.0}, model()
    features, value, late = numbers()
    alone.compile(keras.optimizers.SGD(0.05, momentum=0.9), losses, loss_weights=shares)
    weight = (np.arange(ROWS) % 3).astype("float32")
    labels, weights = {"value": value, "late": late}, {"value": weight, "late": weight}
    loss = alone.fit(features, labels, ROWS, 2, 0, sample_weight=weights).history["loss"]
    fitted = estimator(
        model(), loss=losses, loss_weights=shares, metrics={"late": ["accuracy"]}, label_cols=["late", "value"],
        sample_weight_col="weight", batch_size=ROWS // 2, scale_lr=False,
    ).fit(df)  # fmt: skip
    assert [row["loss"] for row in fitted.getHistory()] == pytest.approx(loss, rel=1e-5)
    for mine, theirs in zip(fitted.getModel().get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, 1e-4, 1e-6)


def test_what_cannot_work_is_said_before_ranks_start(df: DataFrame) -> None:
    best = keras.callbacks.ModelCheckpoint("best.keras", monitor="loss")
    with pytest.raises(ValueError, match="monitor='mae' and a checkpoint_callback with monitor='loss'"):
        estimator(net(), checkpoint_callback=best, monitor="mae").fit(df)
    with pytest.raises(ValueError, match="BackupAndRestore loads weights of an earlier fit"):
        estimator(net(), callbacks=[keras.callbacks.BackupAndRestore("folder")]).fit(df)
    excluding = keras.optimizers.AdamW()
    excluding.exclude_from_weight_decay(var_list=net().trainable_variables[:1])
    with pytest.raises(ValueError, match="var_list"):
        estimator(net(), optimizer=excluding).fit(df)
    with pytest.raises(ValueError, match="has no variables yet"):
        estimator(keras.Sequential([keras.layers.Dense(1)]))
    with pytest.raises(TypeError, match=r"expected a keras\.Model"):
        estimator("model")
    with pytest.raises(ValueError, match="optimizer is missing"):
        estimator(net(), optimizer=None).fit(df)
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
    with pytest.raises(ValueError, match="scale_lr=False"):
        estimator(net(), optimizer=keras.optimizers.SGD(schedule)).fit(df)
    with pytest.raises(ModelError, match="takes 1 inputs"):
        estimator(net(), feature_cols=["features", "weight"]).fit(df)
    with pytest.raises(ModelError, match="a step of training failed"):
        estimator(net(), feature_cols=["weight"]).fit(df)
    with pytest.raises(TypeError, match="train_reader_num_workers threads read ahead"):
        estimator(net(), tensorflow_dataset_prefetch_buffer_size=3)
