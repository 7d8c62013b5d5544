"""SyncBatchNorm as a module: what it sends, what it refuses, and conversion of models."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import cloudpickle
import pytest
import torch

import spark_hvd.torch as hvd
from spark_hvd.torch.sync_batch_norm import SyncBatchNorm
from tests.contract.sync_batch_norm_cases import CHANNELS, EXACT, compare, joined_batch, mine, pair
from tests.ranks import Ranks, ranks

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with ranks(2) as started:
        started.run(torch.set_num_threads, 1)
        yield started


def test_one_message_each_way(two: Ranks) -> None:
    def fn() -> list[tuple[str, tuple[int, ...]]]:
        sent = []

        def spy(tensor: torch.Tensor, *, name: str, **options: Any) -> torch.Tensor:
            sent.append((name, tuple(tensor.shape)))
            return hvd.allreduce(tensor, **options)

        first, second = (SyncBatchNorm(CHANNELS).double() for _ in range(2))
        batch = joined_batch([2], 4, 0).requires_grad_()
        with mock.patch("spark_hvd.torch.sync_batch_norm.allreduce", spy):
            second(first(batch)).sum().backward()
            first(batch.detach()).sum().backward()  # the input needs no gradient, so none is sent
            with torch.no_grad():
                first(batch)
            first.eval()(batch).sum().backward()
        numbers = {f"sync_batch_norm.{norm._number}": key for norm, key in ((first, "first"), (second, "second"))}
        return [(" ".join([numbers[name.rpartition(".")[0]], name.rpartition(".")[2]]), shape) for name, shape in sent]

    forward, backward = (2, 2 * CHANNELS + 1), (2, CHANNELS)
    both = [("first forward", forward), ("second forward", forward)]
    back = [("second backward", backward), ("first backward", backward)]
    assert two.run(fn) == [[*both, *back, both[0], both[0]]] * 2


def test_a_joined_batch_without_two_values(two: Ranks) -> None:
    def fn() -> None:
        ours, theirs = pair(2)
        with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
            ours(mine(joined_batch([1, 0], 2, 0), [1, 0]))
        compare(ours, theirs, [0, 0], 2)
        assert ours.running_var.tolist() == [1.0] * CHANNELS

    two.run(fn)


def test_wrong_inputs(two: Ranks) -> None:
    def fn() -> None:
        for mode in (True, False):
            norm = SyncBatchNorm(CHANNELS).train(mode)
            for shape in ((CHANNELS,), (2, CHANNELS, 1, 1, 1, 1)):
                with pytest.raises(ValueError, match="2 to 5 dimensions"):
                    norm(torch.ones(shape))
            with pytest.raises(ValueError, match="expected 6 channels"):
                norm(torch.ones(2, 5))
            with pytest.raises(TypeError, match=r"got torch\.int64"):
                norm(torch.ones(2, CHANNELS, dtype=torch.int64))
        once = SyncBatchNorm(CHANNELS).double()
        batch = joined_batch([4], 2, 0).requires_grad_()
        (gradient,) = torch.autograd.grad((once(batch) ** 2).sum(), batch, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiate twice"):
            gradient.sum().backward()

    two.run(fn)


def test_process_sets() -> None:
    def fn() -> None:
        pair_of_ranks, last = hvd.add_process_set([0, 1]), hvd.add_process_set([2])
        mine_of_them = last if hvd.rank() == 2 else pair_of_ranks
        counts = [2, 3] if hvd.rank() < 2 else [0, 0, 4]
        ours, theirs = pair(4)
        ours.process_set = mine_of_them
        whole, weights = joined_batch(counts, 4, 0).requires_grad_(), joined_batch(counts, 4, 1)
        part = mine(whole, counts).detach().requires_grad_()
        output, expected = ours(part), theirs(whole)
        torch.testing.assert_close(output, mine(expected, counts), **EXACT)
        (output * mine(weights, counts)).sum().backward()
        (expected * weights).sum().backward()
        torch.testing.assert_close(part.grad, mine(whole.grad, counts), **EXACT)
        for buffer, other in zip(ours.buffers(), theirs.buffers(), strict=True):
            torch.testing.assert_close(buffer, other, **EXACT)
        with pytest.raises(ValueError, match="not a member"):
            SyncBatchNorm(CHANNELS, process_set=pair_of_ranks if hvd.rank() == 2 else last)(torch.ones(2, CHANNELS))
        with pytest.raises(ValueError, match="not registered"):
            SyncBatchNorm(CHANNELS, process_set=hvd.ProcessSet([0]))(torch.ones(2, CHANNELS))

    with ranks(3) as three:
        three.run(fn)


def test_beside_ranks_that_have_joined(two: Ranks) -> None:
    def fn() -> None:
        ours, theirs = pair(4)
        whole = joined_batch([3], 4, 0)
        if hvd.rank() == 0:
            torch.testing.assert_close(ours(whole), theirs(whole), **EXACT)
        hvd.join()

    two.run(fn)


def test_convert() -> None:
    shared = torch.nn.BatchNorm1d(CHANNELS)
    model: Any = torch.nn.Sequential(
        torch.nn.Sequential(torch.nn.Linear(3, CHANNELS), shared),
        shared,
        torch.nn.ModuleDict({"norm": torch.nn.BatchNorm2d(2, eps=0.5, momentum=None, affine=False)}),
        torch.nn.SyncBatchNorm(3, track_running_stats=False),
        torch.nn.InstanceNorm1d(3),
    )
    model[2].eval()
    before, parameters = model.state_dict(), list(model.parameters())
    marker = hvd.ProcessSet([0])
    assert SyncBatchNorm.convert_sync_batchnorm(model, process_set=marker) is model
    assert isinstance(model[1], SyncBatchNorm)
    assert model[1] is model[0][1]
    assert model[1].running_mean is shared.running_mean
    inner = model[2]["norm"]
    assert isinstance(inner, SyncBatchNorm)
    assert (inner.eps, inner.momentum, inner.affine, inner.training) == (0.5, None, False, False)
    assert inner.process_set is marker
    assert isinstance(model[3], SyncBatchNorm)
    assert model[3].running_mean is None
    assert isinstance(model[4], torch.nn.InstanceNorm1d)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert model.state_dict().keys() == before.keys()
    assert SyncBatchNorm.convert_sync_batchnorm(model[1]) is model[1]
    alone = SyncBatchNorm.convert_sync_batchnorm(shared)
    assert isinstance(alone, SyncBatchNorm)
    assert alone.weight is shared.weight
    with pytest.raises(ValueError, match="LazyBatchNorm1d has no parameters yet"):
        SyncBatchNorm.convert_sync_batchnorm(torch.nn.LazyBatchNorm1d())


def test_outside_a_world() -> None:
    """As torch's SyncBatchNorm without a process group, it can be tried on the driver."""
    norm = SyncBatchNorm(CHANNELS)
    assert torch.equal(norm(torch.eye(CHANNELS)), torch.nn.BatchNorm1d(CHANNELS)(torch.eye(CHANNELS)))
    copied = cloudpickle.loads(cloudpickle.dumps(copy.deepcopy(norm.eval())))
    assert torch.equal(copied(torch.eye(CHANNELS)), norm(torch.eye(CHANNELS)))
