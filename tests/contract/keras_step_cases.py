"""Keras' torch backend with manual steps: `apply` is the step, however often backward was called."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.contract.keras_cases import FEATURES, ROWS, _data, _keras, _model

STEPS = 4


def _apply(model: Any, optimizer: Any) -> None:
    variables = model.trainable_variables
    with torch.no_grad():
        optimizer.apply([variable.value.grad for variable in variables], variables)


def _compare(rank: int, size: int, turn: Callable[[Any, Any, Any, torch.Tensor], None]) -> None:
    keras, hvd = _keras()
    rows = torch.from_numpy(_data()[0])
    results = []
    for mine, wrap in ((rows, lambda optimizer: optimizer), (rows[rank::size], hvd.DistributedOptimizer)):
        first, second = _model(keras, 3), _model(keras, 4)
        optimizers = wrap(keras.optimizers.Adam(0.01)), wrap(keras.optimizers.SGD(0.05, momentum=0.9))
        for model, optimizer in zip((first, second), optimizers, strict=True):
            optimizer.build(model.trainable_variables)
        for _ in range(STEPS):
            turn(first, second, optimizers, mine)
        results.append([*first.get_weights(), *second.get_weights()])
    assert rows.shape == (ROWS, FEATURES)
    for alone, together in zip(*results, strict=True):
        np.testing.assert_allclose(together, alone, rtol=1e-4, atol=1e-5)


def two_optimizers(rank: int, size: int) -> None:
    """One backward through both models, as in a GAN, yields gradients for both; each optimizer has its own loss."""

    def turn(first: Any, second: Any, optimizers: Any, rows: torch.Tensor) -> None:
        for model, optimizer in zip((second, first), reversed(optimizers), strict=True):
            first.zero_grad()
            second.zero_grad()
            through = second(rows * first(rows))
            loss = optimizer.scale_loss((through - (0.0 if model is first else 1.0)).square().mean())
            loss.backward()
            _apply(model, optimizer)

    _compare(rank, size, turn)


def two_backwards_and_one_step(rank: int, size: int) -> None:
    """Gradients of two losses add up."""

    def turn(first: Any, second: Any, optimizers: Any, rows: torch.Tensor) -> None:
        first.zero_grad()
        optimizers[0].scale_loss(first(rows).square().mean()).backward()
        optimizers[0].scale_loss((first(rows.flip(1)) - 1).square().mean()).backward()
        _apply(first, optimizers[0])

    _compare(rank, size, turn)


def gradients_leave_during_backward(rank: int, size: int) -> None:
    """In Keras' own step, the last layer's gradients are in flight before the first layer's arrive; weights agree."""
    keras, hvd = _keras()
    x, y = _data()
    first, second, alone = _model(keras, 3), _model(keras, 3), _model(keras, 3)
    last, launched = list(second.layers[-1].trainable_variables), list[int]()
    together = [
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9), groups=[last]),
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9)),
    ]

    def look(_: torch.Tensor) -> None:
        reducer = together[0]._exchange.reducer
        launched.append(0 if reducer is None else reducer._gradients.opened().launched)

    second.layers[0].kernel.value.register_hook(look)
    for model, optimizer in zip((second, first), together, strict=True):
        model.compile(optimizer, "mse")
        model.fit(x[rank::size], y[rank::size], batch_size=4, epochs=2, shuffle=False, verbose=0)
    assert launched == [0, 0, *[1] * 6]  # nothing is planned in the first step, and the second one is only observed

    alone.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    alone.fit(x, y, batch_size=4 * size, epochs=2, shuffle=False, verbose=0)
    for ours, plain, reference in zip(second.get_weights(), first.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, plain)
        np.testing.assert_allclose(ours, reference, rtol=1e-4, atol=1e-5)


def _compiled(*rates: float) -> tuple[Any, Any]:
    """Two equal models, with SGD at these rates. The second one's optimizer reduces gradients."""
    keras, hvd = _keras()
    alone, together = models = _model(keras, 3), _model(keras, 3)
    plain, reduced = map(keras.optimizers.SGD, rates)
    alone.compile(plain, "mse")
    together.compile(hvd.DistributedOptimizer(reduced), "mse")
    return models


def what_apply_is_given_is_reduced(rank: int, size: int) -> None:
    """This includes a program's wrapper around apply that changes gradients."""
    alone, together = _compiled(0.1, 0.05)
    x, y = _data()
    apply, factor = together.optimizer.apply, 4.0 * rank  # 0 and 4: the mean is 2 times the gradient
    together.optimizer.apply = lambda grads, variables: apply([factor * each for each in grads], variables)
    for _ in range(STEPS):
        alone.train_on_batch(x, y)
        together.train_on_batch(x, y)
    for reference, ours in zip(alone.get_weights(), together.get_weights(), strict=True):
        np.testing.assert_allclose(ours, reference, rtol=1e-4, atol=1e-5)


def hooks_of_the_program_change_gradients(rank: int, size: int) -> None:
    """Hooks that are registered once gradients are sent during backward run after the optimizer's own."""
    alone, together = _compiled(0.05, 0.05)
    x, y = _data()

    def double(value: torch.Tensor) -> None:
        assert value.grad is not None
        value.grad.mul_(2)

    for step in range(2 * STEPS):
        if step == STEPS:
            for variable in [*alone.trainable_variables, *together.trainable_variables]:
                variable.value.register_post_accumulate_grad_hook(double)
        alone.train_on_batch(x, y)
        together.train_on_batch(x[rank::size], y[rank::size])
    for reference, ours in zip(alone.get_weights(), together.get_weights(), strict=True):
        np.testing.assert_allclose(ours, reference, rtol=1e-4, atol=1e-5)


def gradients_in_parts_and_steps_broken_off(rank: int, size: int) -> None:
    """A reentrant checkpoint yields part of a gradient in its own backward; a backward that fails is not a step."""
    keras, hvd = _keras()
    x, y = _data()

    class Twice(keras.layers.Dense):  # type: ignore[misc, name-defined]
        def call(self, inputs: Any) -> Any:
            run = super().call
            return run(torch.utils.checkpoint.checkpoint(run, inputs + 0 * self.kernel.value.sum(), use_reentrant=True))

    def turn(layer: Any, optimizer: Any, rows: slice, broken: int) -> list[Any]:
        random.seed(3)
        model = keras.Sequential([keras.layers.Input((FEATURES,)), layer(FEATURES), keras.layers.Dense(1)])
        model.compile(optimizer, "mse")
        model.optimizer.build(model.trainable_variables)
        for step in range(STEPS):
            if step == broken:
                _break_off(model, x[rows], y[rows])
            model.train_on_batch(x[rows], y[rows])
        return list(model.get_weights())

    for layer, broken in ((Twice, -1), (keras.layers.Dense, 1), (keras.layers.Dense, 3)):
        alone = turn(layer, keras.optimizers.SGD(0.05), slice(None), -1)
        together = turn(layer, hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), slice(rank, None, size), broken)
        for reference, ours in zip(alone, together, strict=True):
            np.testing.assert_allclose(ours, reference, rtol=1e-4, atol=1e-5)


def _fail(_: torch.Tensor) -> None:
    raise ZeroDivisionError


def a_step_that_one_rank_breaks_off(rank: int, size: int) -> None:
    """No gradient was sent: those that arrived are dropped, and the other ranks wait for this one's next step."""
    alone, together = _compiled(0.05, 0.05)
    x, y = _data()
    mine = slice(rank, None, size)
    for step in range(STEPS + 2):
        alone.train_on_batch(x, y)
        if step in (3, 5) and rank == 1:
            _break_off(together, x[mine], y[mine])
        elif step == 3:
            with pytest.raises(ValueError, match="incompatible with the layer"):
                together.train_on_batch(x[mine, :-1], y[mine])  # in forward
        if step == 5:  # continues with manual steps
            together.zero_grad()
            together.optimizer.scale_loss((together(x[mine]) - torch.from_numpy(y[mine])).square().mean()).backward()
            _apply(together, together.optimizer)
        else:
            together.train_on_batch(x[mine], y[mine])
    for reference, ours in zip(alone.get_weights(), together.get_weights(), strict=True):
        np.testing.assert_allclose(ours, reference, rtol=1e-4, atol=1e-5)


def a_step_broken_off_when_gradients_have_left(rank: int, size: int) -> None:
    """Other ranks may use the sent gradients, so no step follows, neither Keras' own nor a manual one."""
    keras, hvd = _keras()
    x, y = _data()
    model = _model(keras, 3)
    last = list(model.layers[-1].trainable_variables)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), groups=[last]), "mse")
    for _ in range(3):
        model.train_on_batch(x, y)
    before = model.get_weights()
    _break_off(model, x, y)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"the gradients of 2 of 4 variables had been sent, first '3\.bias'"):
            model.train_on_batch(x, y)
    model.zero_grad()
    model(x).square().mean().backward()  # not for the optimizer
    with pytest.raises(RuntimeError, match="start again from a checkpoint"):
        _apply(model, model.optimizer)
    np.testing.assert_equal(model.get_weights(), before)


def _break_off(model: Any, x: Any, y: Any) -> None:
    handle = model.layers[0].kernel.value.register_hook(_fail)
    with pytest.raises(ZeroDivisionError):
        model.train_on_batch(x, y)
    handle.remove()


def ranks_that_agree_end_a_fit_together(rank: int, size: int) -> None:
    """As in docs/keras.md: the bad row is on one rank."""
    keras, hvd = _keras()
    x, y = _data()
    ended = []

    class StopTogether(keras.callbacks.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            stops = hvd.allreduce(float(self.model.stop_training), op=hvd.Max, name="stop")
            self.model.stop_training = bool(stops > 0)
            ended.append(batch)

    y = y.copy()
    if rank == 1:
        y[4] = float("nan")
    model = _model(keras, 3)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), keras.callbacks.TerminateOnNaN(), StopTogether()]
    model.fit(x, y, batch_size=4, epochs=2, verbose=0, shuffle=False, callbacks=callbacks)
    assert ended == [0, 1]


def what_cannot_be_compiled(rank: int, size: int) -> None:
    """fit switches it off; a step without its callback raises our error and not XLA's."""
    keras, hvd = _keras()
    x, y = _data()
    start = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    model, by_hand = _model(keras, 3), _model(keras, 3)
    by_hand.first_optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01))
    for each, optimizer in ((model, hvd.DistributedOptimizer(keras.optimizers.SGD(0.01))), (by_hand, "sgd")):
        each.compile(optimizer, "mse", jit_compile=True)
        start.set_model(each)
        assert each.jit_compile is False
    if keras.config.backend() == "tensorflow":
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse", jit_compile=True)
        with pytest.raises(ValueError, match=r"call compile\(\) with jit_compile=False"):
            model.train_on_batch(x, y)
