"""What ranks run with Keras on the torch backend, and compare; Keras is imported in the ranks only."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROWS, FEATURES = 32, 6
Case = Callable[[int, int], None]


def on_tensorflow(rank: int, size: int) -> None:
    """The first case, for ranks that should use TensorFlow."""
    os.environ["KERAS_BACKEND"] = "tensorflow"
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)


def _keras() -> tuple[Any, Any]:
    import keras

    import spark_hvd.keras as hvd

    return keras, hvd


def _data(rows: int = ROWS) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    generator = np.random.default_rng(7)
    x = generator.normal(size=(rows, FEATURES)).astype("float32")
    return x, (x @ generator.normal(size=(FEATURES, 1))).astype("float32")


def _model(keras: Any, seed: int) -> Any:
    random.seed(seed)  # Keras takes its seeds from here; its own function would import TensorFlow even on torch
    return keras.Sequential(
        [keras.layers.Input((FEATURES,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)]
    )


def _fit(keras: Any, model: Any, optimizer: Any, x: Any, y: Any, batch: int, callbacks: Any = (), **how: Any) -> Any:
    model.compile(optimizer, "mse", metrics=["mae"])
    return model.fit(x, y, batch_size=batch, epochs=2, shuffle=False, verbose=0, callbacks=list(callbacks), **how)


def _optimizers(keras: Any) -> dict[str, Any]:
    make = keras.optimizers
    every = {
        "momentum": lambda: make.SGD(0.05, momentum=0.9),
        "adam with decay": lambda: make.AdamW(0.01, weight_decay=0.01),
        "clipped": lambda: make.SGD(0.1, global_clipnorm=0.05),
        "accumulating": lambda: make.Adam(0.01, gradient_accumulation_steps=2, clipnorm=0.01),
        "scaled": lambda: make.LossScaleOptimizer(make.Adam(0.01)),
        "averaged weights": lambda: make.SGD(0.1, use_ema=True, ema_momentum=0.5),
    }
    few = keras.config.backend() != "torch" and not os.environ.get("SPARK_HVD_NIGHT")  # TensorFlow compiles each fit
    return {name: every[name] for name in ("momentum", "accumulating", "scaled")} if few else every


def _mine(rank: int, size: int, each: int) -> list[int]:
    """This rank's rows, chosen so that all ranks' batches together are those of one process that reads in order."""
    return [row for row in range(ROWS) if row // each % size == rank]


def training_equals_that_of_one_rank_on_the_joined_batch(rank: int, size: int) -> None:
    keras, hvd = _keras()
    x, y = _data()
    for name, make in _optimizers(keras).items():
        alone = _model(keras, 3)
        _fit(keras, alone, make(), x, y, 4 * size)
        model, optimizer = _model(keras, 3 + rank), make()
        assert hvd.DistributedOptimizer(optimizer) is optimizer
        mine = _mine(rank, size, 4)
        start = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        _fit(keras, model, optimizer, x[mine], y[mine], 4, [start])
        weights = [np.asarray(weight) for weight in model.get_weights()]
        for found, wanted in zip(weights, alone.get_weights(), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=2e-5, err_msg=name)
        for other in hvd.allgather_object(weights):
            assert all(np.array_equal(one, two) for one, two in zip(weights, other, strict=True)), name


def gradients_are_reduced_on_update_steps_only(rank: int, size: int) -> None:
    keras, hvd = _keras()
    from spark_hvd.world.activity import activity

    x, y = _data()
    model = _model(keras, 3)
    before = activity.optimizer_steps
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01), backward_passes_per_step=4)
    _fit(keras, model, optimizer, x, y, 4)
    assert activity.optimizer_steps - before == 2 * ROWS // 4 // 4


def sums_of_batches_are_those_of_horovod(rank: int, size: int) -> None:
    """backward_passes_per_step sums batches unless they should be averaged; op=Sum sums ranks."""
    keras, hvd = _keras()
    x, y = _data()
    changes = []
    for options in ({}, {"average_aggregated_gradients": True}, {"op": hvd.Sum}):
        model = _model(keras, 3)
        start = model.get_weights()
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.001), backward_passes_per_step=2, **options)
        model.compile(optimizer, "mse")
        for _ in range(2):
            model.train_on_batch(x, y)
        changes.append([new - old for new, old in zip(model.get_weights(), start, strict=True)])
    for summed, averaged, of_ranks in zip(*changes, strict=True):
        np.testing.assert_allclose(summed, 2 * averaged, rtol=1e-3, atol=1e-7)
        np.testing.assert_allclose(of_ranks, size * summed, rtol=1e-3, atol=1e-7)


def a_saved_model_loads_without_us(rank: int, size: int) -> None:
    keras, hvd = _keras()
    x, y = _data()
    with tempfile.TemporaryDirectory() as folder:
        for name, make in _optimizers(keras).items():
            model = _model(keras, 3)
            optimizer = make()
            wanted = type(optimizer)
            optimizer = hvd.DistributedOptimizer(optimizer)
            _fit(keras, model, optimizer, x, y, 16)
            path = Path(folder, "model.keras")
            model.save(path)
            loaded = keras.models.load_model(path)
            assert type(loaded.optimizer) is wanted, name
            assert int(loaded.optimizer.iterations) == int(optimizer.iterations) > 0
            for one, two in zip(loaded.optimizer.variables, optimizer.variables, strict=True):
                np.testing.assert_array_equal(np.asarray(one), np.asarray(two))


def a_layer_that_one_rank_does_not_use(rank: int, size: int) -> None:
    """Its gradient is None on one rank, and finally None on all of them."""
    keras, hvd = _keras()
    import torch

    for steps in (None, 2):
        layers = [keras.layers.Dense(1, use_bias=False) for _ in range(3)]
        random.seed(3)
        for layer in layers:
            layer.build((None, FEATURES))
        variables = [layer.kernel for layer in layers]
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.5, gradient_accumulation_steps=steps))
        start = [np.array(variable) for variable in variables]
        used = layers[: 2 if rank == 0 else 1]
        for _ in range(4):
            for variable in variables:
                variable.value.grad = None
            loss = sum(layer(torch.ones(2, FEATURES)).mean() for layer in used)
            loss.backward()
            with torch.no_grad():
                optimizer.apply([variable.value.grad for variable in variables], variables)
        wanted = [0.5 * 4 / (steps or 1) * share for share in (1.0, 1 / size, 0.0)]
        for variable, old, change in zip(variables, start, wanted, strict=True):
            np.testing.assert_allclose(old - np.array(variable), np.full_like(old, change), rtol=1e-4, atol=1e-6)


def local_variables_stay_local(rank: int, size: int) -> None:
    keras, hvd = _keras()
    for options, local_change in (({}, (rank + 1) / size), ({"scale_local_gradients": False}, rank + 1.0)):
        shared, local = keras.Variable(np.zeros(3, "float32")), keras.Variable(np.zeros(3, "float32"))
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), **options)
        optimizer.register_local_var(local)
        gradient = keras.ops.full((3,), rank + 1.0)
        optimizer.apply([gradient, gradient], [shared, local])
        np.testing.assert_allclose(np.array(shared), -(size + 1) / 2)
        np.testing.assert_allclose(np.array(local), -local_change)


def metrics_are_the_mean_of_all_ranks(rank: int, size: int) -> None:
    keras, hvd = _keras()
    x, y = _data()
    seen = []
    after = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(dict(logs)))
    model = _model(keras, 3 + rank)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01))
    mine = _mine(rank, size, 4)
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        local := keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(dict(logs))),
        hvd.callbacks.MetricAverageCallback(),
        after,
    ]
    assert local is not after
    history = _fit(keras, model, optimizer, x[mine], y[mine], 4, callbacks, validation_data=(x[mine], y[mine]))
    assert [*seen[0]] == ["loss", "mae", "val_loss", "val_mae"]
    everybody = hvd.allgather_object(seen)
    for name in seen[0]:
        assert len({ranks[0][name] for ranks in everybody}) == size
        np.testing.assert_allclose(seen[1][name], np.mean([ranks[0][name] for ranks in everybody]))
        assert [seen[1][name], seen[3][name]] == history.history[name]


def a_rank_with_inf_leaves_nobody_waiting(rank: int, size: int) -> None:
    """mixed_float16: the LossScaleOptimizer is outermost, and all ranks skip the step."""
    keras, hvd = _keras()
    x, y = _data()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        for steps in (None, 2):
            model = _model(keras, 3)
            plain = keras.optimizers.SGD(0.001, gradient_accumulation_steps=steps)
            optimizer = hvd.DistributedOptimizer(plain)
            assert isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
            bad = x.copy()
            if rank == size - 1:
                bad[1] = np.inf
            model.compile(optimizer, "mse")
            assert model.optimizer is optimizer
            for batch in (x, bad, x, x):
                model.train_on_batch(batch, y)
            skipped = 15 - np.log2(float(optimizer.dynamic_scale))
            assert skipped in (1, 2)  # the first scale may be too large
            assert int(plain._iterations) == 4 - skipped
            weights = model.get_weights()
            assert all(np.isfinite(weight).all() for weight in weights)
            for other in hvd.allgather_object(weights):
                assert all(np.array_equal(one, two) for one, two in zip(weights, other, strict=True))
    finally:
        keras.config.set_dtype_policy("float32")


def wrong_ways_round(rank: int, size: int) -> None:
    keras, hvd = _keras()
    x, y = _data()

    def refused(error: type[Exception], words: str, call: Any) -> None:
        with pytest.raises(error, match=words):
            call()

    wrapped = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01))
    refused(ValueError, "wrap it once", lambda: hvd.DistributedOptimizer(wrapped))
    refused(TypeError, "expected an optimizer of Keras", lambda: hvd.DistributedOptimizer("sgd"))
    refused(ValueError, "Average and Sum", lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(0.01), op=hvd.Adasum))
    accumulating = keras.optimizers.SGD(0.01, gradient_accumulation_steps=2)
    refused(
        ValueError,
        "accumulates gradients already",
        lambda: hvd.DistributedOptimizer(accumulating, backward_passes_per_step=2),
    )
    outside = keras.optimizers.LossScaleOptimizer(wrapped)
    refused(ValueError, "Wrap the other way round", lambda: hvd.DistributedOptimizer(outside))
    start = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    model = _model(keras, 3)
    refused(ValueError, "Wrap the other way round", lambda: _fit(keras, model, outside, x, y, 16, [start]))


def rates_and_momentum(rank: int, size: int) -> None:
    """A warm-up to the scaled rate, then steps down; accumulated momentum is scaled with the rate."""
    keras, hvd = _keras()
    x, y = _data(16)
    model = _model(keras, 3)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.4, momentum=0.5)), "mse")
    rates = []
    call = hvd.callbacks
    callbacks = [
        call.LearningRateWarmupCallback(0.4, warmup_epochs=2, verbose=1),
        call.LearningRateScheduleCallback(0.4, 0.1, start_epoch=2, end_epoch=4),
        call.LearningRateScheduleCallback(0.4, lambda epoch: 0.5, start_epoch=4),
        keras.callbacks.LambdaCallback(
            on_train_batch_begin=lambda batch, logs: rates.append(float(np.array(model.optimizer.learning_rate)))
        ),
    ]
    history = model.fit(x, y, batch_size=8, epochs=5, verbose=0, callbacks=callbacks)
    share = 1 / size
    warm = [0.4 * (share + (1 - share) * done) for done in (0.25, 0.5, 0.75, 1.0)]
    np.testing.assert_allclose(rates, [*warm, 0.4, 0.4, 0.04, 0.04, 0.2, 0.2], rtol=1e-5)
    np.testing.assert_allclose(history.history["lr"], [warm[1], 0.4, 0.4, 0.04, 0.2], rtol=1e-5)
    history = model.fit(x, y, batch_size=4, verbose=0, callbacks=callbacks[:1])  # in a fit with 4 batches per epoch
    np.testing.assert_allclose(history.history["lr"], [warm[1]], rtol=1e-5)

    # The same arithmetic as momentum * new / old in the batch that changes the rate.
    for make in (keras.optimizers.SGD, keras.optimizers.RMSprop):
        optimizer = make(0.2, momentum=0.5)
        model = _model(keras, 3)
        model.compile(optimizer, "mse")
        model.train_on_batch(x, y)
        gathered = [np.array(each) for each in getattr(optimizer, "momentums", None) or optimizer._momentums]
        change = call.LearningRateScheduleCallback(0.1, lambda epoch: 0.5)
        change.set_model(model)
        change.on_train_begin()
        change.on_epoch_begin(0)
        change.on_train_batch_begin(0)
        assert float(np.array(optimizer.learning_rate)) == np.float32(0.05)
        for old, new in zip(gathered, getattr(optimizer, "momentums", None) or optimizer._momentums, strict=True):
            np.testing.assert_allclose(np.array(new), old / 4, rtol=1e-5)


def a_model_is_loaded_with_its_optimizer(rank: int, size: int) -> None:
    keras, hvd = _keras()
    x, y = _data()

    class Slow(keras.optimizers.SGD):  # type: ignore[misc, name-defined]
        pass

    model = _model(keras, 3)
    optimizer = hvd.DistributedOptimizer(Slow(0.01, momentum=0.9))
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "best.keras"))
        best = hvd.callbacks.BestModelCheckpoint("loss", filepath=path)
        _fit(keras, model, optimizer, x, y, 16, [best])
        loaded = hvd.load_model(path, custom_optimizers=[Slow])
        with pytest.raises(ValueError, match="legacy_opts"):
            hvd.load_model(path, legacy_opts=True)
    assert isinstance(loaded.optimizer, Slow)
    mine = _mine(rank, size, 16)
    for each in (model, loaded):
        each.fit(x[mine], y[mine], batch_size=16, shuffle=False, verbose=0)
    for one, two in zip(model.get_weights(), loaded.get_weights(), strict=True):
        np.testing.assert_array_equal(one, two)
    with pytest.raises(ValueError, match="so it cannot save"):
        hvd.callbacks.BestModelCheckpoint().on_train_begin()


def values_of_all_ranks(rank: int, size: int) -> None:
    keras, hvd = _keras()
    assert hvd.allreduce(rank + 1.0) == (size + 1) / 2
    assert hvd.allreduce(keras.ops.array([rank]), op=hvd.Max).tolist() == [size - 1]
    assert hvd.allgather(np.full((rank + 1, 2), rank)).tolist() == [[r, r] for r in range(size) for _ in range(r + 1)]
    variable = keras.Variable(np.full(3, rank, "float32"))
    assert hvd.broadcast(variable, size - 1).tolist() == [size - 1.0] * 3
    assert hvd.reducescatter(np.arange(2 * size), op=hvd.Sum).tolist() == [2 * rank * size, (2 * rank + 1) * size]


def the_driver_sees_how_far_fit_is(rank: int, size: int) -> None:
    keras, hvd = _keras()
    import time

    from spark_hvd.world.activity import activity

    x, y = _data()
    seen: list[dict[str, Any]] = []

    def look(batch: int, logs: Any) -> None:
        seen.append(activity.progress.facts(time.monotonic()))

    model = _model(keras, 3)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01))
    callbacks = [hvd.callbacks.ProgressCallback(16), keras.callbacks.LambdaCallback(on_train_batch_end=look)]
    history = _fit(keras, model, optimizer, x, y, 16, callbacks, validation_data=(x, y))
    assert [(facts["epoch"], facts["epochs"], facts["step"]) for facts in seen] == [
        (0, 2, 1),
        (0, 2, 2),
        (1, 2, 1),
        (1, 2, 2),
    ]
    last = activity.progress.facts(time.monotonic())
    assert last["samples"] - seen[0]["samples"] == 16 * 3
    assert last["metrics"] == {name: values[-1] for name, values in history.history.items()}


def batches_are_normalized_together(rank: int, size: int) -> None:
    """The result equals that of one rank on the joined batch; the weights of one layer stay local."""
    keras, hvd = _keras()
    rows = np.random.default_rng(0).normal(3.0, 2.0, (4 * size, 5)).astype("float32")
    together, alone = hvd.SyncBatchNormalization(), keras.layers.BatchNormalization()
    mine = slice(4 * rank, 4 * rank + 4)
    for layer, batch in ((together, rows[mine]), (alone, rows)):
        layer(batch)
        outputs = keras.ops.convert_to_numpy(layer(batch, training=True))
        expected = outputs[mine] if layer is alone else (found := outputs)
    np.testing.assert_allclose(found, expected, 1e-4, 1e-4)
    for name in ("moving_mean", "moving_variance"):
        np.testing.assert_allclose(*(np.array(getattr(layer, name)) for layer in (together, alone)), 1e-4)

    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    layer.build((None, 2))
    optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(1.0), local_layers=layer)
    optimizer.build([layer.kernel, other := keras.Variable(np.zeros(3, "float32"))])
    gradients = [np.full(each.shape, rank + 1.0, "float32") for each in (layer.kernel, other)]
    optimizer.apply([keras.ops.convert_to_tensor(each) for each in gradients], [layer.kernel, other])
    np.testing.assert_allclose(np.array(layer.kernel), 1 - (rank + 1) / size)
    np.testing.assert_allclose(np.array(other), -(size + 1) / 2)


def uneven_data(rank: int, size: int) -> None:
    """A rank without more batches joins, and the others continue alone."""
    import spark_hvd.torch as ranks

    keras, hvd = _keras()
    model = keras.Sequential(
        [keras.layers.Input((2,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")]
    )
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
    x, y = np.ones((4 * (2 + rank), 2), "float32"), np.full((4 * (2 + rank), 1), 5.0, "float32")
    model.fit(x, y, batch_size=4, epochs=1, verbose=0, shuffle=False)
    ranks.join()
    reference, kernel = [], np.ones(2)
    for _ in range(2 + rank):
        kernel = kernel - 0.01 * 2 * (kernel.sum() - 5.0) * np.ones(2)
        reference.append(kernel)
    np.testing.assert_allclose(np.array(model.get_weights()[0])[:, 0], reference[-1], 1e-5)
