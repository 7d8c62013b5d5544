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
from spark_hvd.errors import NotInitializedError
from spark_hvd.sync_batch_norm import SyncBatchNorm
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
        with mock.patch("spark_hvd.sync_batch_norm.allreduce", spy):
            second(first(batch)).sum().backward()
            first(batch.detach()).sum().backward()  # the input needs no gradient: nothing is sent for it
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


def test_process_set_goes_to_the_collectives(two: Ranks) -> None:
    def fn() -> None:
        seen = []

        def spy(tensor: torch.Tensor, *, process_set: Any, **options: Any) -> torch.Tensor:
            seen.append(process_set)
            return hvd.allreduce(tensor, **options)

        everyone, myself = (
            mock.Mock(**{"size.return_value": size, "rank.return_value": hvd.rank()}) for size in (2, 1)
        )
        ours, theirs = pair(4)
        ours.process_set = everyone
        whole = joined_batch([2, 3], 4, 0).requires_grad_()
        with mock.patch("spark_hvd.sync_batch_norm.allreduce", spy):
            output = ours(mine(whole, [2, 3]))
            output.sum().backward()
            SyncBatchNorm(CHANNELS, process_set=myself).double()(whole)
        torch.testing.assert_close(output, mine(theirs(whole), [2, 3]), **EXACT)
        assert seen == [everyone, everyone]

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
    marker = object()
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
    norm = SyncBatchNorm(CHANNELS)
    with pytest.raises(NotInitializedError):
        norm(torch.eye(CHANNELS))
    copied = cloudpickle.loads(cloudpickle.dumps(copy.deepcopy(norm.eval())))
    assert torch.equal(copied(torch.eye(CHANNELS)), norm(torch.eye(CHANNELS)))
