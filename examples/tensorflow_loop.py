"""Handwritten digits in TensorFlow, by a loop of one's own: a `tf.function` whose tape averages gradients over ranks.

python examples/tensorflow_loop.py            ranks inside Spark tasks
python examples/tensorflow_loop.py --local    the same, as plain processes: no Spark, no Java

It needs `pip install ".[tensorflow]"`.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import spark_hvd

BATCH = 32
SETTINGS = {"KERAS_BACKEND": "tensorflow"}
"""Read when Keras is imported, here and in ranks."""


def make_model() -> Any:
    """A CNN for 8 x 8 images in 10 classes."""
    import keras
    from keras import layers

    return keras.Sequential([
        keras.Input((8, 8, 1)),
        layers.Conv2D(16, 3, padding="same", activation="relu"),
        layers.Conv2D(32, 3, padding="same", activation="relu"),
        layers.MaxPooling2D(),
        layers.Flatten(),
        layers.Dense(10),
    ])  # fmt: skip


def train(images: np.ndarray, digits: np.ndarray, epochs: int) -> list[np.ndarray]:
    """Train on every size-th image, together with the other ranks; return the weights, the same on every rank."""
    import keras
    import tensorflow as tf

    import spark_hvd.tensorflow as hvd

    hvd.init()
    keras.utils.set_random_seed(hvd.rank())
    model, optimizer = make_model(), keras.optimizers.Adam(2e-3)
    optimizer.build(model.trainable_variables)
    hvd.broadcast_variables([*model.variables, *optimizer.variables], root_rank=0)
    losses = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def step(images, digits):  # type: ignore[no-untyped-def] # AutoGraph compiles this anew, where Any is no name
        with tf.GradientTape() as tape:
            loss = losses(digits, model(images, training=True))
        tape = hvd.DistributedGradientTape(tape)  # averages what the tape finds
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    mine = slice(hvd.rank(), None, hvd.size())
    rows = tf.data.Dataset.from_tensor_slices((images[mine], digits[mine]))
    steps = len(images) // (hvd.size() * BATCH)  # the same number on every rank
    batches = rows.shuffle(len(images), seed=hvd.rank()).batch(BATCH, drop_remainder=True).take(steps)
    for epoch in range(1, epochs + 1):
        loss = tf.reduce_mean([step(*batch) for batch in hvd.progress(batches, epoch=epoch, epochs=epochs)])
        loss = hvd.allreduce(loss, op=hvd.Average)
        if hvd.rank() == 0 and (epoch % 5 == 0 or epoch == epochs):
            print(f"epoch {epoch:2d}/{epochs}   loss {loss.numpy():.4f}")
    return model.get_weights()


def main() -> None:
    """Train on 80 % of the digits with `run` (or `run_local`), test on the rest."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-proc", type=int, default=2, help="ranks (default: 2)")
    parser.add_argument("--epochs", type=int, default=15, help="passes over the images (default: 15)")
    parser.add_argument("--local", action="store_true", help="plain processes instead of Spark tasks")
    arguments = parser.parse_args()

    data = load_digits()
    images = (data.images[..., np.newaxis] / 16).astype(np.float32)  # (1797, 8, 8, 1), in 0..1
    train_images, test_images, train_digits, test_digits = train_test_split(
        images, data.target, test_size=0.2, stratify=data.target, random_state=0
    )

    os.environ.update(SETTINGS)
    inputs: dict[str, Any] = {
        "args": (train_images, train_digits, arguments.epochs),
        "num_proc": arguments.num_proc,
        "env": SETTINGS,
    }
    if arguments.local:
        weights = spark_hvd.run_local(train, **inputs)
    else:
        from local_spark import local_session

        spark = local_session("digits", slots=arguments.num_proc)
        weights = spark_hvd.run(train, spark=spark, **inputs)
        spark.stop()

    model = make_model()
    model.set_weights(weights[0])
    right = model.predict(test_images, verbose=0).argmax(1) == test_digits
    print(f"{right.sum()} of {len(right)} test digits right: accuracy {right.mean():.3f}")


if __name__ == "__main__":
    main()
