"""Horovod's dialect: its gradients, joins and errors, if the world uses it; ranks that differ do not connect."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator

import cloudpickle
import pytest
import torch

import spark_hvd.torch as hvd
from spark_hvd.world.config import Config
from spark_hvd.world.env import read_config
from tests.horovod.support import LastingWorld, everyones
from tests.ranks import Ranks

cloudpickle.register_pickle_by_value(sys.modules[__name__])

OWN, HOROVOD = {"dialect": "spark_hvd"}, {"dialect": "horovod"}


@pytest.fixture
def horovods(three: LastingWorld) -> Iterator[LastingWorld]:
    """Let ranks use it for a test; rank 0 decides for all what joined ranks contribute, so all wait for it."""

    def speak(settings: dict[str, str]) -> None:
        hvd.init(**settings)
        hvd.barrier()

    three.run(speak, HOROVOD)
    yield three
    three.run(speak, OWN)


def test_gradients(horovods: LastingWorld) -> None:
    def gradient(call: object, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        result = call(x)  # type: ignore[operator]
        result.backward(torch.full_like(result, hvd.rank() + 1.0))
        assert x.grad is not None
        return x.grad

    def fn() -> None:
        rank, size = hvd.rank(), hvd.size()
        x = everyones(torch.float64, 6, 2)[rank]
        total = size * (size + 1) / 2  # of the gradients of the ranks' results
        for call, expected in (
            (lambda x: hvd.allgather(x, name="g"), total / size),
            (lambda x: hvd.grouped_allgather([x, x], name="g")[1], total / size),
            (lambda x: hvd.broadcast(x, 1, name="g"), total / size if rank == 1 else 0.0),
            (lambda x: hvd.allreduce(x, op=hvd.Sum, name="g"), total),
            (lambda x: hvd.allreduce(x, op=hvd.Average, name="g"), total / size),
            (lambda x: hvd.allreduce(x, op=hvd.Min, name="g"), 1.0),
            (lambda x: hvd.allreduce(x, op=hvd.Max, prescale_factor=2.0, name="g"), 2.0 * size),
        ):
            assert torch.equal(gradient(call, x), torch.full_like(x, expected)), (expected, gradient(call, x))
        rows = torch.arange(1.0, size + 1, dtype=torch.float64).repeat_interleave(2)[:, None].expand(6, 2)
        for op, factor in ((hvd.Sum, float(size)), (hvd.Average, 1.0)):
            found = gradient(lambda x, op=op: hvd.reducescatter(x, op=op, name="r", postscale_factor=0.5), x)
            assert torch.allclose(found, rows * factor / 2)
        own = gradient(lambda x: hvd.allgather(x, name="g", grad_op=hvd.Sum), x)
        assert torch.equal(own, torch.full_like(x, total))

    horovods.run(fn)


def test_a_joined_rank_adds_zeros_and_counts(horovods: LastingWorld) -> None:
    def fn() -> None:
        rank = hvd.rank()
        if rank != 0:
            for op, expected in ((hvd.Average, 2 / 3 * 3.0), (hvd.Sum, 6.0), (hvd.Min, 0.0), (hvd.Product, 0.0)):
                for _ in range(3):  # by its name, then by its number
                    assert hvd.allreduce(torch.tensor([3.0]), op=op, name=op.name).item() == expected
            assert hvd.allreduce(torch.tensor([-3.0]), op=hvd.Max, name="max").item() == 0.0
            for call in (
                lambda: hvd.allgather(torch.ones(2), name="gather"),
                lambda: hvd.broadcast(torch.ones(2), 1, name="cast"),
                lambda: hvd.alltoall(torch.ones(3), name="all"),
                lambda: hvd.reducescatter(torch.ones(3), name="scatter"),
            ):
                with pytest.raises(hvd.HorovodInternalError, match=r"rank 0 called join\(\)"):
                    call()
        hvd.join()

    horovods.run(fn)


def test_mistakes_are_horovods_errors(horovods: LastingWorld) -> None:
    def fn() -> None:
        with pytest.raises(hvd.HorovodInternalError, match="every rank must pass the same shape") as raised:
            hvd.allreduce(torch.ones(hvd.rank() + 1), name="shapes")
        assert isinstance(raised.value, hvd.MismatchError)
        handle = hvd.allreduce_async(torch.ones(2), name="twice")
        with pytest.raises(hvd.HorovodInternalError, match="still under way") as raised:
            hvd.allreduce_async(torch.ones(2), name="twice")
        assert isinstance(raised.value, hvd.DuplicateNameError)
        hvd.synchronize(handle)
        with pytest.raises(ValueError, match="Average does not support"):
            hvd.allreduce(torch.ones(2, dtype=torch.bool))

    horovods.run(fn)


def test_the_optimizer(horovods: LastingWorld) -> None:
    def fn() -> None:
        model = torch.nn.ModuleDict({"used": torch.nn.Linear(2, 1), "unused": torch.nn.Linear(2, 1)})
        hvd.broadcast_parameters(model.state_dict())
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5), model.named_parameters()
        )
        names = optimizer._parameter_names  # type: ignore[union-attr]
        assert names == {param: name for name, param in model.named_parameters()}
        before = model["unused"].weight.clone()
        model["used"](torch.ones(3, 2)).sum().backward()
        optimizer.synchronize()
        assert torch.equal(model["unused"].weight.grad, torch.zeros(1, 2))  # type: ignore[arg-type]
        with warnings.catch_warnings(), optimizer.skip_synchronize():  # type: ignore[union-attr]
            warnings.simplefilter("error")
            optimizer.step()
        assert torch.allclose(model["unused"].weight, before * 0.95)
        optimizer.zero_grad()
        model["used"](torch.ones(3, 2)).sum().backward()
        optimizer.synchronize()
        with pytest.warns(UserWarning, match="Horovod would reduce the gradients once more"):
            optimizer.step()
        assert torch.allclose(model["unused"].weight, before * 0.95**2)
        fresh = torch.nn.Linear(2, 1)
        hvd.broadcast_optimizer_state(torch.optim.SGD(fresh.parameters(), lr=0.1))
        assert fresh.bias.grad is not None, "as after the step that Horovod makes"
        assert fresh.bias.grad.item() == 0

    horovods.run(fn)


def test_handles_are_ints(horovods: LastingWorld) -> None:
    """They are put into arrays and tensors and come back as other ints; each is waited for once."""

    def fn() -> None:
        x = torch.full((2,), hvd.rank() + 1.0)
        started = [
            hvd.allreduce_async(x, op=hvd.Sum),
            hvd.allreduce_async_(x.clone(), op=hvd.Sum),
            hvd.grouped_allreduce_async([x, x], op=hvd.Sum),
            hvd.grouped_allreduce_async_([x.clone()], op=hvd.Sum),
            hvd.allgather_async(x),
            hvd.grouped_allgather_async([x]),
            hvd.broadcast_async(x, 1),
            hvd.broadcast_async_(x.clone(), 1),
            hvd.alltoall_async(torch.ones(hvd.size())),
            hvd.reducescatter_async(torch.ones(hvd.size()), op=hvd.Sum),
            hvd.grouped_reducescatter_async([torch.ones(hvd.size())], op=hvd.Sum),
        ]
        assert all(isinstance(handle, int) for handle in started)
        numbers = torch.tensor(started).tolist()
        assert sorted({*numbers}) == numbers, "no two are the same, and they count up"
        names = dict(zip(started, "abcdefghijk", strict=True))
        assert "".join(names[number] for number in numbers) == "abcdefghijk"
        results = {number: hvd.synchronize(number) for number in reversed(numbers)}
        assert results[started[0]].tolist() == results[started[1]].tolist() == [6.0, 6.0]
        assert results[started[4]].tolist() == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]
        assert results[started[6]].tolist() == results[started[7]].tolist() == [2.0, 2.0]
        assert hvd.synchronize(numbers[0]) is None
        with pytest.raises(ValueError, match=f"handle {numbers[0]} does not belong to this world"):
            hvd.poll(numbers[0])
        with pytest.raises(TypeError, match="expected a handle"):
            hvd.synchronize("allreduce")
        handle = hvd.allreduce_async(torch.ones(hvd.rank() + 1), name="shapes")
        with pytest.raises(hvd.HorovodInternalError, match="every rank must pass the same shape"):
            hvd.synchronize(handle)
        assert hvd.synchronize(handle) is None
        late = hvd.allreduce_async(x, name="late", op=hvd.Sum) if hvd.rank() == 0 else None
        if late is not None:
            assert not hvd.poll(late)
            with pytest.raises(TimeoutError):
                late.wait(timeout=0.01)
        hvd.barrier()
        late = late or hvd.allreduce_async(x, name="late", op=hvd.Sum)
        assert late.wait(timeout=60).tolist() == [6.0, 6.0], "they have the methods of other handles too"

    horovods.run(fn)


def test_results_of_a_group_are_derived_one_by_one(horovods: LastingWorld) -> None:
    def fn() -> None:
        for call in (hvd.grouped_allreduce, hvd.grouped_allgather):
            ones = [torch.ones(2, requires_grad=True) for _ in range(3)]
            for result in call(ones):
                result.sum().backward()
            assert [one.grad.tolist() for one in ones] == [[1.0, 1.0]] * 3  # type: ignore[union-attr]

    horovods.run(fn)


def test_ranks_that_differ_do_not_meet() -> None:
    def fn() -> str:
        os.environ["SPARK_HVD_DIALECT"] = "horovod" if int(os.environ["RANK"]) else "spark_hvd"
        with pytest.raises(hvd.PlanMismatchError, match="'spark_hvd' on rank 0 and 'horovod' on rank 1") as raised:
            hvd.init()
        assert not hvd.is_initialized()
        return str(raised.value)

    ranks = Ranks(2, join=False)
    try:
        assert len({*ranks.run(fn)}) == 1
    finally:
        ranks.close()


def test_the_setting() -> None:
    assert read_config({"SPARK_HVD_DIALECT": "horovod"}).is_horovod
    assert not Config().is_horovod
    with pytest.raises(ValueError, match="dialect='klingon': expected 'spark_hvd' or 'horovod'"):
        Config(dialect="klingon")
