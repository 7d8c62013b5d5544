"""One training in TensorFlow, by a tape or by Keras' fit, on each of n ranks or in one process with all rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

RANKS, ROWS = 2, 4
"""Number of ranks, and rows of each in a step."""


@dataclass(frozen=True)
class TapeCase:
    """A training.

    Attributes:
        seed: Seed of weights and rows.
        loop: "tape", "tape in a function", "optimizer" (a distributed one with a plain tape) or "fit" of Keras.
        optimizer: Name of an optimizer in keras.optimizers.
        clipnorm: Option of the optimizer; None for none.
        sparse_as_dense: Option of the tape or optimizer.
        steps: Number of steps.
        frozen: Whether the first dense layer is not trained.
        passes: Backward passes per step of an optimizer.
    """

    seed: int
    loop: str
    optimizer: str
    clipnorm: float | None
    sparse_as_dense: bool
    steps: int
    frozen: bool
    passes: int


tape_cases = st.builds(
    TapeCase,
    seed=st.integers(0, 999),
    loop=st.sampled_from(("tape", "tape in a function", "optimizer", "fit")),
    optimizer=st.sampled_from(("SGD", "Adam", "RMSprop", "Adagrad")),
    clipnorm=st.sampled_from((None, None, 0.05)),
    sparse_as_dense=st.booleans(),
    steps=st.integers(2, 4),
    frozen=st.booleans(),
    passes=st.sampled_from((1, 1, 2)),
)


def trained(case: TapeCase, rank: int | None) -> list[np.ndarray[Any, Any]]:
    """Return the weights after all steps of a rank or, for None, of the process with all rows."""
    import keras
    import tensorflow as tf

    import spark_hvd.keras as keras_hvd
    import spark_hvd.tensorflow as hvd

    keras.utils.set_random_seed(case.seed)
    model = _net(keras)
    model.layers[2].trainable = not case.frozen
    options = {"epsilon": 1e-4} if case.optimizer != "SGD" else {"momentum": 0.9}
    optimizer = getattr(keras.optimizers, case.optimizer)(0.05, clipnorm=case.clipnorm, **options)
    by_optimizer = case.loop in ("optimizer", "fit")
    if rank is not None and by_optimizer:
        optimizer = keras_hvd.DistributedOptimizer(
            optimizer,
            sparse_as_dense=case.sparse_as_dense,
            backward_passes_per_step=case.passes,
            average_aggregated_gradients=True,
        )
    if rank is None and (by_optimizer or case.sparse_as_dense):
        optimizer.__class__ = _dense(type(optimizer))
    together = 1 if rank is not None or not by_optimizer else case.passes
    steps = [_rows(case, number, rank) for number in range(case.steps * (case.passes if by_optimizer else 1))]
    if case.loop == "fit":
        model.compile(optimizer, "mse")
        joined = [np.concatenate(each) for each in zip(*steps, strict=True)]
        size = len(steps[0][0]) * together
        model.fit(joined[:2], joined[2], batch_size=size, shuffle=False, verbose=0)
        return [np.asarray(each) for each in model.get_weights()]

    def step(words: Any, numbers: Any, labels: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model([words, numbers], training=True) - labels) ** 2)
        if rank is not None and not by_optimizer:
            tape = hvd.DistributedGradientTape(tape, sparse_as_dense=case.sparse_as_dense)
        sources = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, sources), sources, strict=True))

    if case.loop == "tape in a function":
        optimizer.build(model.trainable_variables)
        step = tf.function(step, autograph=False)
    for first in range(0, len(steps), together):
        parts = steps[first : first + together]
        step(*(tf.constant(np.concatenate(each)) for each in zip(*parts, strict=True)))
    return [np.asarray(each) for each in model.get_weights()]


def _dense(base: Any) -> Any:
    """The optimizer for gradients as dense as their variables: if a batch has a table's row twice, Keras on
    TensorFlow squares the two parts apart, and the distributed optimizer their sum."""  # fmt: skip

    class Dense(base):  # type: ignore[misc] # Any
        def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
            import tensorflow as tf

            return super().apply([tf.convert_to_tensor(each) for each in grads], trainable_variables)

    return Dense


def _net(keras: Any) -> Any:
    words, numbers = keras.layers.Input((3,), dtype="int32"), keras.layers.Input((2,))
    seen = keras.layers.Flatten()(keras.layers.Embedding(5, 2)(words))
    hidden = keras.layers.Dense(3, "tanh")(keras.layers.Concatenate()([seen, numbers]))
    return keras.Model([words, numbers], keras.layers.Dense(1)(hidden))


def _rows(case: TapeCase, number: int, rank: int | None) -> list[np.ndarray[Any, Any]]:
    draw = np.random.default_rng((case.seed, number))
    words = draw.integers(0, 5, (RANKS * ROWS, 3)).astype("int32")
    numbers, labels = (draw.normal(size=(RANKS * ROWS, each)).astype("float32") for each in (2, 1))
    mine = slice(None) if rank is None else slice(rank * ROWS, (rank + 1) * ROWS)
    return [words[mine], numbers[mine], labels[mine]]
