"""The API for MXNet on two ranks, in its own environment: the row `mxnet` of tests/matrix.py.

The default tests, whose names begin with ``test_``, exclude it, because MXNet needs an old numpy.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import cloudpickle
import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon, nd

import spark_hvd.mxnet as hvd
import spark_hvd.torch
from spark_hvd import run_local
from spark_hvd.mxnet.arrays import to_torch
from tests.ranks import Ranks, ranks

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def world() -> Iterator[Ranks]:
    with ranks(2) as two:
        yield two


def inputs(seed: int, rows: int) -> tuple[Any, Any]:
    """Return a batch of small images with their labels."""
    random = np.random.RandomState(seed)
    images = random.rand(rows, 2, 8, 8).astype("float32")
    return nd.array(images), nd.array(images[:, :, :4].mean(axis=(1, 2, 3))[:, None])


def network(kind: str = "gluon") -> Any:
    """Return convolutions, whose arrays oneDNN rearranges, and layers whose sizes the first batch determines."""
    net = gluon.nn.HybridSequential(prefix=f"{kind}_")
    with net.name_scope():
        net.add(gluon.nn.Conv2D(16, 3, activation="relu"), gluon.nn.Conv2D(16, 3), gluon.nn.Dense(1))
    return net


def trained(make: Any, share: slice, size: int, steps: int = 4) -> list[Any]:
    """Return the weights after some steps on a share of the rows. All ranks start from rank 0's weights."""
    mx.random.seed(hvd.rank())
    net = network()
    net.initialize(mx.init.Xavier())
    if hvd.size() > 1:
        hvd.broadcast_parameters(net.collect_params(), root_rank=0)
    net.hybridize()
    trainer = make(net.collect_params())
    images, wanted = inputs(3, 8)
    net(images[share]).wait_to_read()  # in inference, which lays out weights as oneDNN prefers
    for _ in range(steps):
        with autograd.record():
            loss = gluon.loss.L2Loss()(net(images[share]), wanted[share])
        loss.backward()
        trainer.step(size)
    return [value.data().asnumpy() for _, value in sorted(net.collect_params().items())]


def test_collectives_move_values_of_each_dtype_and_shape(world: Ranks) -> None:
    def body() -> None:
        rank, size = hvd.rank(), hvd.size()
        assert (size, hvd.local_rank(), hvd.local_size(), hvd.is_initialized()) == (2, rank, 2, True)
        for dtype in ("float16", "float32", "float64", "uint8", "int8", "int32", "int64"):
            given = nd.array([[1, 2, 3], [4, 5, 6]], dtype=dtype) * (rank + 1)
            total = hvd.allreduce(given, op=hvd.Sum, name=dtype)
            assert total.dtype == given.dtype == np.dtype(dtype)
            assert total.asnumpy().tolist() == [[3, 6, 9], [12, 15, 18]]
            assert given.asnumpy()[0].tolist() == [rank + 1, 2 * rank + 2, 3 * rank + 3]
            one, other = to_torch(given), to_torch(given)
            assert one.data_ptr() == other.data_ptr()  # the array's own memory
            assert hvd.allreduce_(given, op=hvd.Max) is given
            assert given.asnumpy().tolist() == [[2, 4, 6], [8, 10, 12]]
            rows = hvd.allgather(nd.full((rank + 1, 2), rank + 5, dtype=dtype))
            assert (rows.dtype, rows.asnumpy().tolist()) == (np.dtype(dtype), [[5, 5], [6, 6], [6, 6]])
        yes = nd.array([rank, 1, 0], dtype=bool)
        assert hvd.allreduce(yes, op=hvd.Sum).asnumpy().tolist() == [True, True, False]
        assert hvd.allreduce_(yes, op=hvd.Product).asnumpy().tolist() == yes.asnumpy().tolist() == [False, True, False]
        assert hvd.allreduce(nd.array([1.0 + rank])).asscalar() == 1.5
        assert hvd.allreduce(nd.array([1.0]), prescale_factor=3, postscale_factor=0.5, op=hvd.Sum).asscalar() == 3
        assert hvd.allreduce(nd.array([1.0, 2.0]), op=hvd.Adasum).asnumpy().tolist() == [1, 2]
        scalar = hvd.allreduce(mx.np.array(2.0 + rank, dtype="float32"))
        assert isinstance(scalar, mx.np.ndarray)
        assert float(scalar) == 2.5
        assert [each.shape for each in hvd.grouped_allgather([nd.ones((3,)), nd.ones((1, 4))])] == [(6,), (2, 4)]
        group = [nd.array([rank]), nd.array([[2]], dtype="int64")]
        assert [each.asnumpy().tolist() for each in hvd.grouped_allreduce(group, op=hvd.Sum)] == [[1], [[4]]]
        assert hvd.grouped_allreduce_(group, op=hvd.Sum) is group
        assert [each.asnumpy().tolist() for each in group] == [[1], [[4]]]
        assert hvd.grouped_allreduce([]) == []
        mine = nd.array([rank, 7])
        assert hvd.broadcast(mine, 1).asnumpy().tolist() == [1, 7]
        assert mine.asnumpy().tolist() == [rank, 7]
        assert hvd.broadcast_(mine, 1) is mine
        assert mine.asnumpy().tolist() == [1, 7]
        assert hvd.alltoall(nd.array([10, 11]) + 2 * rank).asnumpy().tolist() == [10 + rank, 12 + rank]
        got, counts = hvd.alltoall(nd.arange(3) + 3 * rank, splits=nd.array([1, 2], dtype="int32"))
        assert got.asnumpy().tolist() == ([0, 3] if rank == 0 else [1, 2, 4, 5])
        assert (counts.dtype, counts.asnumpy().tolist()) == (np.int32, [1 + rank] * 2)
        assert hvd.reducescatter(nd.arange(3), op=hvd.Sum).asnumpy().tolist() == ([0, 2] if rank == 0 else [4])
        part = nd.arange(12).reshape((4, 3))
        hvd.allreduce_(part[1:3], op=hvd.Sum)  # a view into an array
        assert part.asnumpy()[:, 0].tolist() == [0, 6, 12, 9]
        assert hvd.broadcast_object({"rank": rank}, 1) == {"rank": 1}
        assert hvd.allgather_object(rank) == [0, 1]
        alone = hvd.add_process_set([1])
        if rank == 1:
            assert hvd.allreduce(nd.array([4.0]), op=hvd.Sum, process_set=alone).asscalar() == 4
        hvd.remove_process_set(alone)

    world.run(body)


def test_operations_before_and_after_are_in_order_although_mxnet_runs_them_later(world: Ranks) -> None:
    def body() -> None:
        heavy = nd.ones((700, 700)) / 700
        for step in range(5):
            value = nd.full((700, 700), hvd.rank() + step)
            for _ in range(6):
                value = nd.dot(value, heavy)  # still in flight
            reader = nd.dot(value, heavy) + 0  # reads what the next line writes over
            hvd.allreduce_(value)
            after = nd.dot(value, heavy)
            value[:] = -1
            made = hvd.allreduce(nd.dot(after, heavy), op=hvd.Sum)
            after[:] = -1
            np.testing.assert_allclose(reader.asnumpy(), hvd.rank() + step, rtol=1e-4)
            np.testing.assert_allclose(made.asnumpy(), 2 * step + 1, rtol=1e-4)

    world.run(body)


def test_two_ranks_train_as_one_on_the_whole_batch(world: Ranks) -> None:
    """With convolutions, whose shapes follow from the first batch; only rounding differs."""

    def body() -> dict[str, list[Any]]:
        half = slice(4 * hvd.rank(), 4 * hvd.rank() + 4)
        options: dict[str, Any] = {"optimizer_params": {"learning_rate": 0.01, "momentum": 0.9}}
        found = {
            "plain": trained(lambda each: hvd.DistributedTrainer(each, "sgd", **options), half, 4),
            "divided": trained(
                lambda each: hvd.DistributedTrainer(each, "sgd", gradient_predivide_factor=4.0, prefix="b", **options),
                half, 4,
            ),
            "narrow": trained(
                lambda each: hvd.DistributedTrainer(each, "sgd", compression=hvd.Compression.fp16, **options), half, 4
            ),
        }  # fmt: skip
        inside = hvd.DistributedOptimizer(mx.optimizer.SGD(learning_rate=0.01, momentum=0.9))

        def unwrapping(params: Any) -> Any:
            with pytest.warns(UserWarning, match="uses the optimizer inside"):
                return hvd.DistributedTrainer(params, inside)

        found["unwrapped"] = trained(unwrapping, half, 4)
        return found

    def whole() -> list[Any]:
        options = {"learning_rate": 0.01, "momentum": 0.9}
        mx.random.seed(0)
        return trained(lambda each: gluon.Trainer(each, "sgd", options, kvstore=None), slice(0, 8), 8)

    first, second = world.run(body)
    with ranks(1) as one:
        alone = one.run(whole)[0]
    for kind, weights in first.items():
        for mine, theirs, wanted in zip(weights, second[kind], alone, strict=True):
            assert np.array_equal(mine, theirs), kind
            np.testing.assert_allclose(mine, wanted, rtol=2e-2 if kind == "narrow" else 2e-4, atol=1e-4, err_msg=kind)


def test_a_module_trains_with_an_optimizer_around_another(world: Ranks) -> None:
    def body() -> tuple[float, int, list[float]]:
        data = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=1, no_bias=True, name="only")
        module = mx.mod.Module(mx.sym.LinearRegressionOutput(data, name="out"), label_names=["out_label"])
        module.bind([("data", (2, 1))], [("out_label", (2, 1))])
        module.init_params(mx.init.Constant(hvd.rank() + 1.0))
        hvd.broadcast_parameters(module.get_params()[0])
        module.set_params(*module.get_params())
        start = float(module.get_params()[0]["only_weight"].asscalar())
        optimizer = hvd.DistributedOptimizer(mx.optimizer.SGD(learning_rate=0.5, rescale_grad=0.5))
        optimizer.set_learning_rate(0.25)
        module.init_optimizer(kvstore=None, optimizer=optimizer)
        batch = mx.io.DataBatch([nd.full((2, 1), 1.0)], [nd.full((2, 1), 2.0 * hvd.rank())])
        module.forward_backward(batch)
        module.update()
        return start, optimizer.inside.num_update, [float(module.get_params()[0]["only_weight"].asscalar())]

    # Rank 0 starts from 1. Gradients are 1 - 0 and 1 - 2, with average 0; so nothing changes.
    assert world.run(body) == [(1.0, 1, [1.0])] * 2


def test_what_cannot_be_done_is_said(world: Ranks) -> None:
    def body() -> None:
        with pytest.raises(TypeError, match="expected an MXNet array, got ndarray"):
            hvd.allreduce(np.ones(2))
        with pytest.raises(TypeError, match='stype "row_sparse": collectives need dense ones'):
            hvd.allreduce(nd.ones((2, 3)).tostype("row_sparse"))
        with pytest.raises(TypeError, match="expected a list of MXNet arrays"):
            hvd.grouped_allreduce_(nd.ones(2))
        with pytest.raises(ValueError, match="expected a number above 0"):
            hvd.DistributedTrainer({}, "sgd", gradient_predivide_factor=0)
        with pytest.raises(TypeError, match=r"mx\.optimizer\.create"):
            hvd.DistributedOptimizer("sgd")
        with pytest.raises(ValueError, match="params must be a dict"):
            hvd.broadcast_parameters([nd.ones(2)])
        kept = nd.full((1 + hvd.rank(),), 3.0)
        with pytest.raises(spark_hvd.torch.MismatchError):
            hvd.broadcast_parameters({"kept": kept})
        assert kept.asnumpy().tolist() == [3.0] * (1 + hvd.rank())
        both = network("contexts")
        both.initialize(ctx=[mx.cpu(0), mx.cpu(1)])
        both(nd.ones((1, 2, 8, 8)))
        with pytest.raises(ValueError, match="on 2 contexts; a rank can use only one"):
            hvd.DistributedTrainer(both.collect_params(), "sgd").allreduce_grads()

    world.run(body)


def test_run_local_starts_ranks_that_import_it_by_horovods_name() -> None:
    def body() -> float:
        importlib.import_module("spark_hvd.horovod")  # Horovod's names exist from now on
        hvd = importlib.import_module("horovod.mxnet")
        hvd.init()
        return float(hvd.allreduce(nd.array([hvd.rank() + 1.0]), op=hvd.Sum).asscalar())

    assert list(run_local(body, num_proc=2, verbose=0)) == [3.0, 3.0]
