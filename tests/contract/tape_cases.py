"""What ranks run with TensorFlow's tapes, and compare."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from tests.contract.tensorflow_cases import faces, ways


def tapes(rank: int, size: int) -> None:
    """Gradients of all ranks, of one, and of a part that stays local."""
    tf, hvd = faces()
    for way in ways(tf):
        dense, table = tf.Variable([2.0, 3.0]), tf.Variable(tf.ones((4, 2)))

        def tape_of(**options: Any) -> Any:
            return hvd.DistributedGradientTape(tf.GradientTape(), **options)

        def gradients(tape: Any, sources: Any, dense: Any = dense, table: Any = table, way: Any = way) -> Any:
            @way
            def step() -> Any:
                with tape:
                    loss = (rank + 1.0) * (tf.reduce_sum(dense) + tf.reduce_sum(tf.gather(table, [rank, rank])))
                return tape.gradient(loss, sources)

            return step()

        mean = (size + 1) / 2
        unused = tf.Variable(1.0)
        first, rows, none = gradients(tape_of(), [dense, table, unused])
        assert none is None
        assert np.allclose(first, mean)
        whole = tf.convert_to_tensor(rows).numpy()[:, 0]
        assert np.allclose(whole[:size], [2.0 * (r + 1) / size for r in range(size)])
        found = gradients(tape_of(sparse_as_dense=True, op=hvd.Sum), {"table": table})["table"]
        assert not isinstance(found, tf.IndexedSlices)
        assert np.allclose(found[:size, 0], [2.0 * (r + 1) for r in range(size)])
        assert np.allclose(gradients(tape_of(gradient_predivide_factor=4.0), dense), mean)
        local = tape_of()
        local.register_local_source(dense)
        assert np.allclose(gradients(local, dense), (rank + 1.0) / size)
        assert isinstance(local, tf.GradientTape)


def ranks_outside_a_set_keep_their_gradients(rank: int, size: int) -> None:
    """The optimizers of the other frameworks do the same."""
    tf, hvd = faces()
    first = hvd.add_process_set([0])
    for way in ways(tf):
        x = tf.Variable([rank + 1.0])

        @way
        def step(x: Any = x) -> Any:
            with tf.GradientTape() as tape:
                value = tf.reduce_sum(x * x)
            return hvd.DistributedGradientTape(tape, process_set=first).gradient(value, [x])

        assert np.allclose(step()[0], 2 * (rank + 1.0))
    hvd.remove_process_set(first)


def uneven_data(rank: int, size: int) -> None:
    """A rank without more data joins, and the others continue alone."""
    tf, hvd = faces()
    weights = tf.Variable([0.0])

    @tf.function
    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weights * (rank + 1.0))
        (gradient,) = hvd.DistributedGradientTape(tape).gradient(loss, [weights])
        weights.assign_sub(gradient)

    for _ in range(2 + rank):
        step()
    hvd.join()
    # Two steps with the mean of both ranks, then one of rank 1 alone.
    assert weights.numpy() == (-3.0 if rank == 0 else -5.0)


def gradients_are_the_users(rank: int, size: int) -> None:
    """They keep their values when the next ones arrive."""
    tf, hvd = faces()
    for way in ways(tf):
        x, y = tf.Variable([1.0, 2.0]), tf.Variable(tf.ones((3, 2)))

        @way
        def step(factor: Any, x: Any = x, y: Any = y) -> Any:
            with tf.GradientTape() as tape:
                value = tf.reduce_sum(factor * x * x) + tf.reduce_sum(y)
            return hvd.DistributedGradientTape(tape, op=hvd.Sum).gradient(value, [x, y])

        first, ones = step(tf.constant(1.0))
        second, _ = step(tf.constant(rank + 1.0))
        assert first.numpy().tolist() == [2.0 * size, 4.0 * size]
        assert second.numpy().tolist() == [2.0 * sum(range(1, size + 1)), 4.0 * sum(range(1, size + 1))]
        assert np.all(ones.numpy() == size)


def other_shapes_of_batches(rank: int, size: int) -> None:
    """A function that one rank traces again, for a smaller last batch, still matches the others."""
    tf, hvd = faces()
    x = tf.Variable([1.0, 2.0])

    @tf.function
    def step(rows: Any) -> Any:
        with tf.GradientTape() as tape:
            value = tf.reduce_mean(rows @ x[:, None])
        return hvd.DistributedGradientTape(tape).gradient(value, [x])[0]

    for rows in ([4, 4], [4, 3], [2, 4], [4, 4]):
        assert np.allclose(step(tf.fill((rows[rank % 2], 2), rank + 1.0)), (size + 1) / 2)


def several_sets_of_variables(rank: int, size: int) -> None:
    """Each set of variables is reduced separately, and leaves nothing behind when it is gone."""
    tf, hvd = faces()
    from spark_hvd.tensorflow.bucketed import _external

    before = len(_external)
    for round_ in range(3):
        x, y = tf.Variable([float(round_)]), tf.Variable([1.0, 1.0])
        with tf.GradientTape(persistent=True) as tape:
            value = (rank + 1.0) * (tf.reduce_sum(x) + 2 * tf.reduce_sum(y))
        tape = hvd.DistributedGradientTape(tape, compression=hvd.Compression.fp16)
        found = [tape.gradient(value, sources) for sources in ([x], [y], [x, y], [x])]
        mean = (size + 1) / 2
        assert [[each.numpy().tolist() for each in one] for one in found] == [
            [[mean]], [[2 * mean] * 2], [[mean], [2 * mean] * 2], [[mean]]
        ]  # fmt: skip
    del x, y, tape, value, found
    gc.collect()
    assert len(_external) <= before


def a_gradient_that_one_rank_lacks(rank: int, size: int) -> None:
    """Every rank raises an error that names it."""
    tf, hvd = faces()
    from spark_hvd.world.errors import PlanMismatchError

    x, y = tf.Variable([1.0]), tf.Variable([1.0, 2.0])
    with tf.GradientTape() as tape:
        value = tf.reduce_sum(x) + (tf.reduce_sum(y) if rank == 0 else 0.0)
    with pytest.raises(PlanMismatchError, match="'source 1' exists on rank 0 only"):
        hvd.DistributedGradientTape(tape).gradient(value, [x, y])
    hvd.barrier()


def gradients_of_what_is_no_variable(rank: int, size: int) -> None:
    """The gradient of a tensor, next to that of a variable."""
    tf, hvd = faces()
    x, y = tf.constant([1.0, 2.0]), tf.Variable([3.0])
    with tf.GradientTape() as tape:
        tape.watch(x)
        value = (rank + 1.0) * (tf.reduce_sum(x) + tf.reduce_sum(y))
    found = hvd.DistributedGradientTape(tape).gradient(value, [x, y])
    assert [each.numpy().tolist() for each in found] == [[(size + 1) / 2] * 2, [(size + 1) / 2]]
