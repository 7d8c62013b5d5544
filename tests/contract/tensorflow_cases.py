"""What ranks run with TensorFlow, and compare; TensorFlow is imported in the ranks only."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

Case = Callable[[int, int], None]


def faces() -> tuple[Any, Any]:
    os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow"}
    import tensorflow as tf

    import spark_hvd.tensorflow as hvd

    return tf, hvd


def ways(tf: Any) -> list[Callable[[Callable[..., Any]], Callable[..., Any]]]:
    return [lambda function: function, tf.function]


def dtypes(rank: int, size: int) -> None:
    """Each dtype is reduced, gathered and sent, also as one row, a scalar and an empty tensor."""
    tf, hvd = faces()
    for name in ("float16", "float32", "float64", "bfloat16", "int8", "uint8", "int32", "int64", "bool"):
        kind = tf.as_dtype(name)
        for shape in ((), (3,), (2, 5), (0, 4)):
            mine = tf.cast(tf.fill(shape, rank + 1), kind)
            if name != "bool":
                total = hvd.allreduce(mine, op=hvd.Sum)
                assert (total.dtype, total.shape) == (kind, mine.shape)
                assert np.all(tf.cast(total, tf.float64).numpy() == sum(range(1, size + 1)))
            gathered = hvd.allgather(mine)
            assert gathered.shape == ((size * shape[0], *shape[1:]) if shape else (size,))
            sent = hvd.broadcast(mine, size - 1)
            assert np.all(tf.cast(sent, tf.float64).numpy() == (1 if name == "bool" else size))


def no_text(rank: int, size: int) -> None:
    """The error names the dtype."""
    tf, hvd = faces()
    with pytest.raises(TypeError, match="dtype string: collectives move numbers"):
        hvd.allreduce(tf.constant(["text"]))


def slices_that_cannot_be(rank: int, size: int) -> None:
    """They are refused before the dense tensors next to them are sent."""
    tf, hvd = faces()
    slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([rank]), tf.constant([size, 2]))
    for op in (hvd.Min, hvd.Adasum):
        with pytest.raises(NotImplementedError, match="of IndexedSlices: expected Sum or Average"):
            hvd.grouped_allreduce([tf.ones([2], tf.int32), slices], op=op)


def compression(rank: int, size: int) -> None:
    """For collectives, and called directly on TensorFlow's tensors; narrow and non-float tensors stay unchanged."""
    tf, hvd = faces()
    for compressor, narrow in ((hvd.Compression.fp16, tf.float16), (hvd.Compression.bf16, tf.bfloat16)):
        for way in ways(tf):
            found = way(lambda x, compressor=compressor: hvd.allreduce(x, op=hvd.Sum, compression=compressor))
            summed = found(tf.fill([3], rank + 1.0))
            assert (summed.dtype, summed.numpy().tolist()) == (tf.float32, [3.0] * 3)
        for kind, wanted in ((tf.float64, narrow), (tf.float16, tf.float16), (tf.int32, tf.int32), (tf.bool, tf.bool)):
            sent, context = compressor.compress(tf.ones([2], kind))
            assert sent.dtype == wanted
            assert compressor.decompress(sent, context).dtype == kind


def gradients_of_collectives(rank: int, size: int) -> None:
    """They are those of the sum of all ranks' losses, eagerly and in a graph."""
    tf, hvd = faces()
    scale = tf.repeat(tf.range(float(size)), 6)
    for way in ways(tf):
        weights = tf.Variable(tf.range(6.0) + rank)

        def gradient(loss: Callable[[Any], Any], way: Any = way, weights: Any = weights) -> Any:
            @way
            def step() -> Any:
                with tf.GradientTape() as tape:
                    value = loss(weights) * (rank + 1.0)
                return tape.gradient(value, weights)

            return step().numpy()

        factors = sum(range(1, size + 1))
        assert np.allclose(gradient(lambda w: tf.reduce_sum(hvd.allreduce(w, op=hvd.Sum))), factors)
        assert np.allclose(gradient(lambda w: tf.reduce_sum(hvd.allreduce(w))), factors / size)
        extreme = gradient(lambda w: tf.reduce_sum(hvd.allreduce(w, op=hvd.Max)))
        assert np.allclose(extreme, factors if rank == size - 1 else 0)
        assert np.allclose(gradient(lambda w: tf.reduce_sum(hvd.allgather(w) * scale)), factors * rank)
        sent = gradient(lambda w: tf.reduce_sum(hvd.broadcast(w, 1)))
        assert np.allclose(sent, factors if rank == 1 else 0)
        back = gradient(lambda w: tf.reduce_sum(hvd.alltoall(w)))
        assert np.allclose(back, np.repeat(np.arange(1, size + 1), 6 // size))
        part = gradient(lambda w: tf.reduce_sum(hvd.reducescatter(w, op=hvd.Sum)))
        assert np.allclose(part, np.repeat(np.arange(1, size + 1), 6 // size))


def other_rows_on_each_rank(rank: int, size: int) -> None:
    """Gathered and exchanged, with gradients, eagerly and in a graph; IndexedSlices have rows, too."""
    tf, hvd = faces()
    for way in ways(tf):

        @way
        def gathered(mine: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(mine)
                every = hvd.allgather(mine)
                loss = tf.reduce_sum(every * every)
            return every, tape.gradient(loss, mine)

        every, gradient = gathered(tf.fill((rank + 1, 2), float(rank)))
        assert every.numpy()[:, 0].tolist() == [float(r) for r in range(size) for _ in range(r + 1)]
        assert np.allclose(gradient, 2.0 * rank * size)

        @way
        def exchanged(mine: Any, splits: Any) -> Any:
            return hvd.alltoall(mine, splits)

        rows, counts = exchanged(tf.fill((2 * size - 1,), float(rank)), tf.constant([1] + [2] * (size - 1)))
        assert counts.numpy().tolist() == [1 if rank == 0 else 2] * size
        assert rows.numpy().tolist() == [float(r) for r in range(size) for _ in range(1 if rank == 0 else 2)]

        @way
        def slices(values: Any, indices: Any) -> Any:
            return hvd.allreduce(tf.IndexedSlices(values, indices, tf.constant([4, 1])))

        found = slices(tf.fill((rank + 1, 1), 1.0), tf.range(rank + 1))
        dense = tf.math.unsorted_segment_sum(found.values, found.indices, 4).numpy().ravel()
        assert np.allclose(dense, [(size - min(row, size)) / size for row in range(4)])


def many_in_one(rank: int, size: int) -> None:
    """A group of dense tensors and slices keeps its order."""
    tf, hvd = faces()
    mixed = [
        tf.constant(1.0),
        tf.IndexedSlices(tf.ones((1, 2)), tf.constant([rank]), tf.constant([size, 2])),
        tf.range(3),
    ]
    one, slices, three = hvd.grouped_allreduce(mixed, op=hvd.Sum)
    assert (one.numpy(), three.numpy().tolist()) == (size, [0, size, 2 * size])
    assert sorted(slices.indices.numpy().tolist()) == list(range(size))


def many_small_ones_in_one(rank: int, size: int) -> None:
    """In graphs they are sent as one; their gradients, and what other ranks see of them, are those of several."""
    tf, hvd = faces()
    values = [tf.fill(shape, float(rank + place)) for place, shape in enumerate([(), (2, 3), (0,), (4,)])]

    def reduced(*given: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(given)
            found = hvd.grouped_allreduce(list(given), op=hvd.Sum, name="small")
            loss = sum(place * tf.reduce_sum(each) for place, each in enumerate(found))
        return found, tape.gradient(loss, given)

    of_all, of_a_graph = reduced, tf.function(reduced)
    for step in (of_a_graph, of_all, of_a_graph if rank else of_all):
        found, gradients = step(*values)
        for place, (each, gradient, mine) in enumerate(zip(found, gradients, values, strict=True)):
            assert each.shape == gradient.shape == mine.shape
            assert np.allclose(each, sum(r + place for r in range(size)))
            assert np.allclose(gradient, place * size)
    with pytest.raises(Exception, match=r"MismatchError.*small"):
        of_a_graph(*([values[0], tf.reshape(values[1], (3, 2)), *values[2:]] if rank else values))


def alike_at_the_start(rank: int, size: int) -> None:
    """All ranks get one rank's variables and objects."""
    tf, hvd = faces()
    for way in ways(tf):
        variables = [tf.Variable(tf.fill((3,), float(rank))), tf.Variable(rank)]
        way(lambda variables=variables: hvd.broadcast_variables(variables, size - 1))()
        assert [variable.numpy().tolist() for variable in variables] == [[size - 1.0] * 3, size - 1]
    assert hvd.broadcast_object_fn(1)({"rank": rank}) == {"rank": 1}
    assert hvd.allgather_object(rank) == list(range(size))


def asked_in_a_graph(rank: int, size: int) -> None:
    """rank_op and its kin are evaluated at run time."""
    tf, hvd = faces()
    asked = tf.function(
        lambda: [hvd.size_op(), hvd.rank_op(), hvd.local_size_op(), hvd.local_rank_op(), hvd.process_set_included_op()]
    )
    assert [int(each) for each in asked()] == [size, rank, size, rank, 1]


def what_differs_is_an_error_on_all(rank: int, size: int) -> None:
    """Eagerly, the error has the type that it has in torch; in a graph it has its text."""
    tf, hvd = faces()
    from spark_hvd.world.errors import MismatchError

    with pytest.raises(MismatchError, match="shape"):
        hvd.allreduce(tf.ones(rank + 1), name="ours")
    with pytest.raises(tf.errors.OpError, match=r"MismatchError.*shape"):
        tf.function(lambda x: hvd.allreduce(x, name="traced"))(tf.ones(rank + 1))
    assert hvd.allreduce(tf.ones(1), op=hvd.Sum).numpy().tolist() == [size], "the world goes on"


def keras_by_its_other_name(rank: int, size: int) -> None:
    """It is one module, whichever way it is imported."""
    faces()
    import spark_hvd.keras
    import spark_hvd.tensorflow.keras as hvd
    import spark_hvd.tensorflow.keras.callbacks as callbacks
    from spark_hvd.tensorflow.keras import elastic

    assert (hvd, callbacks, elastic) == (spark_hvd.keras, spark_hvd.keras.callbacks, spark_hvd.keras.elastic)
    assert spark_hvd.tensorflow.keras is spark_hvd.keras


def in_a_plain_graph(rank: int, size: int) -> None:
    """Without an order of operations, each is matched by its name in the graph."""
    tf, hvd = faces()
    with tf.Graph().as_default():
        results = [hvd.allreduce(tf.fill((number + 1,), float(rank)), op=hvd.Sum) for number in range(2)]
        with tf.compat.v1.Session() as session:
            found = [session.run(results[number]) for number in (1, 0)]
    assert [each.tolist() for each in found] == [[sum(range(size))] * 2, [sum(range(size))]]


def it_learns(rank: int, size: int) -> None:
    """A loop with a tape ends with the same weights on all ranks: those of one rank with all rows."""
    tf, hvd = faces()
    generator = np.random.default_rng(3)
    x = generator.normal(size=(32, 4)).astype("float32")
    y = (x @ generator.normal(size=(4, 1))).astype("float32")

    def train(rows: Any, together: bool) -> Any:
        weights = tf.Variable(tf.fill((4, 1), 0.0 if not together else float(rank)))
        if together:
            hvd.broadcast_variables([weights], 0)

        @tf.function
        def step() -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((tf.constant(x[rows]) @ weights - y[rows]) ** 2)
            if together:
                tape = hvd.DistributedGradientTape(tape)
            weights.assign_sub(0.1 * tape.gradient(loss, weights))

        for _ in range(20):
            step()
        return weights.numpy()

    assert np.allclose(train(slice(rank, None, size), True), train(slice(None), False), atol=1e-5)


def in_horovods_dialect(rank: int, size: int) -> None:
    """Gradients are reduced as the tensors were."""
    tf, hvd = faces()
    hvd.init(dialect="horovod")
    hvd.barrier()
    try:
        for way in ways(tf):
            x = tf.Variable(tf.range(3.0) + rank)

            @way
            def step(x: Any = x) -> Any:
                with tf.GradientTape() as tape:
                    value = tf.reduce_sum(hvd.allreduce(x, op=hvd.Max)) * (rank + 1.0)
                return tape.gradient(value, x)

            assert np.allclose(step(), size)
    finally:
        hvd.init(dialect="spark_hvd")
        hvd.barrier()


def groups_are_scattered(rank: int, size: int) -> None:
    """Each tensor's rows are scattered as if called one by one, with gradients."""
    tf, hvd = faces()
    for way in ways(tf):
        tensors = [tf.fill((5, 2), rank + 1.0), tf.range(4.0) * (rank + 1)]
        total = sum(range(1, size + 1))
        both = way(lambda tensors=tensors: hvd.grouped_reducescatter(tensors, op=hvd.Sum))()
        for mine, tensor in zip(both, tensors, strict=True):
            alone = hvd.reducescatter(tensor, op=hvd.Sum)
            assert np.array_equal(mine.numpy(), alone.numpy())
        assert np.all(both[0].numpy() == total)


def results_of_a_group_derived_at_one_time(rank: int, size: int) -> None:
    """In a plain graph, each result's derivative is its own collective; all of them run at once."""
    tf, hvd = faces()
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        for call in (hvd.grouped_reducescatter, hvd.grouped_allreduce, hvd.grouped_allgather):
            given = [tf.fill([2 * size], rank + 1.0) for _ in range(4)]
            found = call(given) if call is hvd.grouped_allgather else call(given, op=hvd.Sum)
            gradients = [tf.gradients(one, other)[0] for one, other in zip(found, given, strict=True)]
            ones = size if call is not hvd.grouped_reducescatter else 1
            for gradient in session.run(gradients):
                assert gradient.tolist() == [ones] * 2 * size


def plain_graphs(rank: int, size: int) -> None:
    """Variables of a session are rank 0's, and an optimizer of TensorFlow 1 steps with the mean of all gradients."""
    tf, hvd = faces()
    old = tf.compat.v1
    with tf.Graph().as_default():
        weights = old.get_variable("weights", initializer=tf.fill((3,), rank + 1.0), use_resource=True)
        loss = tf.reduce_sum(weights * (rank + 1.0))
        optimizer = hvd.DistributedOptimizer(old.train.GradientDescentOptimizer(1.0))
        train = optimizer.minimize(loss)
        hook = hvd.BroadcastGlobalVariablesHook(0)
        with old.train.MonitoredSession(hooks=[hook]) as session:
            assert np.allclose(session.run(weights), 1.0)
            session.run(train)
            assert np.allclose(session.run(weights), 1.0 - sum(range(1, size + 1)) / size)
    with tf.Graph().as_default():  # many more collectives than a session has threads
        fed = old.placeholder(tf.float32, (2,))
        results = [hvd.allreduce(fed * float(number), op=hvd.Sum) for number in range(16)]
        slope = tf.gradients(hvd.allgather(fed, name="fed"), fed)[0]
        with old.Session(config=old.ConfigProto(inter_op_parallelism_threads=2)) as session:
            for _ in range(3):
                order = list(range(16))[:: 1 if rank else -1]
                found = session.run([results[number] for number in order], {fed: [1.0, 2.0]})
                for number, value in zip(order, found, strict=True):
                    assert np.allclose(value, [size * number, 2 * size * number])
            assert np.allclose(session.run(slope, {fed: [1.0, 2.0]}), size)
            mine = old.placeholder(tf.float32)
            with pytest.raises(tf.errors.OpError, match="every rank must pass the same shape"):
                session.run(hvd.allreduce(mine, name="shapes"), {mine: [0.0] * (rank + 1)})
    with pytest.raises(RuntimeError, match="broadcast_variables"):
        hvd.broadcast_global_variables(0)
    with pytest.raises(ValueError, match="backward_passes_per_step=2"):
        hvd.DistributedOptimizer(old.train.GradientDescentOptimizer(1.0), backward_passes_per_step=2)
    with pytest.raises(TypeError, match="expected an optimizer of Keras or of tf"):
        hvd.DistributedOptimizer("sgd")
    variables = hvd.broadcast_([tf.Variable(float(rank)), tf.Variable([1.0 + rank])], 1)
    assert [each.numpy().tolist() for each in variables] == [1.0, [2.0]]


def batches_are_normalized_together(rank: int, size: int) -> None:
    """The result and its gradients equal those of one rank on the joined batch; batches differ in size."""
    tf, hvd = faces()
    import keras

    assert isinstance(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), keras.optimizers.SGD)
    everyones = np.random.default_rng(0).normal(3.0, 2.0, (4 * size + size - 1, 3, 5)).astype("float32")
    slices = np.split(everyones, [4 * (each + 1) for each in range(size - 1)])
    for way in ways(tf):
        together, alone = hvd.SyncBatchNormalization(axis=-1), keras.layers.BatchNormalization(axis=-1)

        def run(layer: Any, rows: Any, way: Any = way) -> tuple[Any, Any]:
            inputs = tf.Variable(rows)
            layer(inputs)

            @way
            def step() -> Any:
                with tf.GradientTape() as tape:
                    outputs = layer(inputs, training=True)
                    loss = tf.reduce_sum(outputs**3)
                return outputs, tape.gradient(loss, inputs)

            return tuple(each.numpy() for each in step())

        found, expected = run(together, slices[rank]), run(alone, everyones)
        mine = slice(4 * rank, 4 * rank + len(slices[rank]))
        for one, all_rows in zip(found, expected, strict=True):
            assert np.allclose(one, all_rows[mine], 1e-4, 2e-4)
        for name in ("moving_mean", "moving_variance"):
            assert np.allclose(getattr(together, name), getattr(alone, name), 1e-5)
        assert np.allclose(together(slices[rank]), alone(slices[rank]), 1e-4, 1e-5)
