"""Objects, parameters and optimizer state between ranks."""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch

import spark_hvd.torch as hvd
from spark_hvd.collectives import fusion
from tests.ranks import Ranks, ranks

cloudpickle.register_pickle_by_value(sys.modules[__name__])

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, weight_decay=0.3),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.2),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, centered=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01),
    "lbfgs": lambda params: torch.optim.LBFGS(params, lr=0.5, history_size=3),
    "tensor_lr": lambda params: torch.optim.Adam(params, lr=torch.tensor(0.01), foreach=False, capturable=False),
}


@pytest.fixture(scope="module", params=[1, 2])
def world(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with ranks(request.param) as started:
        yield started


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with ranks(2) as started:
        yield started


def model(seed: int) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))


def train(net: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    for _ in range(steps):
        features = torch.randn(8, 4)

        def closure(features: torch.Tensor = features) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = net(features).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]


def equal(left: Any, right: Any) -> bool:
    """Return whether nested state is bitwise equal, dtypes included."""
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(equal(a, b) for a, b in zip(left, right, strict=True))
    return bool(left == right)


def test_objects(world: Ranks) -> None:
    def fn() -> tuple[Any, ...]:
        mine: dict[str, Any] = {
            "rank": hvd.rank(),
            "call": lambda: hvd.rank() * 10,
            "bytes": b"x" * (hvd.rank() * 300_000),
        }
        last = hvd.size() - 1
        got = hvd.broadcast_object(mine, root_rank=last)
        assert (got is mine) == (hvd.rank() == last)
        gathered = hvd.allgather_object(mine)
        assert [len(other["bytes"]) for other in gathered] == [300_000 * other for other in range(hvd.size())]
        assert hvd.broadcast_object(None) is None
        assert hvd.allgather_object(None, name="n") == [None] * hvd.size()
        return got["rank"], [other["rank"] for other in gathered]

    assert world.run(fn) == [(world.size - 1, list(range(world.size)))] * world.size


def test_arrays(world: Ranks) -> None:
    def fn() -> None:
        def arrays(rank: int) -> list[np.ndarray[Any, Any]]:
            large = np.arange(30_000 + rank, dtype=np.int64)
            odd = (large.reshape(2, -1).T, large[::3], large.astype(">f4"), large.astype(np.uint8), large.astype("S5"))
            return [large, np.zeros(0), np.arange(7 + rank), *odd, np.array([{"rank": rank}, None])]

        rank, last = hvd.rank(), hvd.size() - 1
        gathered = hvd.allgather_object(arrays(2 * rank))
        for got, wanted in [
            (hvd.broadcast_object(arrays(2 * rank), last), last),
            *zip(gathered, range(last + 1), strict=True),
        ]:
            for each, true in zip(got, arrays(2 * wanted), strict=True):
                np.testing.assert_array_equal(each, true)
                assert each.dtype == true.dtype
                assert each.flags.writeable
                assert each.flags.aligned
        assert not any(np.shares_memory(one[0], other[0]) for one, other in itertools.combinations(gathered, 2))

    world.run(fn)


def test_unpicklable_objects_fail_everywhere(two: Ranks) -> None:
    def fn() -> None:
        import threading

        mine = threading.Lock() if hvd.rank() == 1 else 5
        with pytest.raises(ValueError, match="object of rank 1 cannot be pickled") as caught:
            hvd.broadcast_object(mine, root_rank=1)
        assert (caught.value.__cause__ is not None) == (hvd.rank() == 1)
        with pytest.raises(ValueError, match="object of rank 1 cannot be pickled"):
            hvd.allgather_object(mine)
        assert hvd.allgather_object(hvd.rank()) == [0, 1]

    two.run(fn)


def test_parameters(world: Ranks) -> None:
    def fn() -> None:
        root = hvd.size() - 1
        wanted, mine = model(root), model(hvd.rank())
        for net, rank in ((mine, hvd.rank()), (wanted, root)):
            net.get_buffer("1.running_mean").fill_(rank)
            net.get_buffer("1.num_batches_tracked").fill_(rank + 5)
        state = mine.state_dict()
        if hvd.rank() == 0:
            state = dict(reversed(state.items()))
        hvd.broadcast_parameters(state, root_rank=root)
        assert equal(mine.state_dict(), wanted.state_dict())
        for form in (lambda net: net.named_parameters(), lambda net: list(net.parameters())):
            other = model(hvd.rank() + 10)
            hvd.broadcast_parameters(form(other), root)
            assert equal(list(other.parameters()), list(model(root + 10).parameters()))
            assert all(param.requires_grad for param in other.parameters())
        hvd.broadcast_parameters({})

    world.run(fn)


def test_parameters_in_pieces(two: Ranks) -> None:
    def fn() -> None:
        rank = hvd.rank()
        big = torch.full((fusion.PIECE_BYTES // 4 + 5,), float(rank))
        strided = torch.full((6, 4), float(rank)).t()
        several = [torch.full((fusion.PIECE_BYTES // 12,), float(rank)) for _ in range(4)]
        others = [torch.full((3,), rank, dtype=dtype) for dtype in (torch.int16, torch.bool, torch.bfloat16)]
        hvd.broadcast_parameters([*several, big, strided, *others, torch.empty(0)], root_rank=1)
        assert all(bool((tensor == 1).all()) for tensor in [*several, big, strided, *others])

    two.run(fn)


def test_parameters_that_differ(two: Ranks) -> None:
    def fn() -> None:
        odd = hvd.rank() == 1
        cases: list[tuple[Any, str]] = [
            ({"a": torch.ones(2), "w": torch.ones(3 if odd else 2)}, r"'w' is torch.float32 of shape \(2,\) on rank 0"),
            ({"w": torch.ones(2, dtype=torch.float64 if odd else torch.float32)}, "torch.float64 of shape"),
            ({"w": torch.ones(2), **({} if odd else {"b": torch.ones(1)})}, "'b' of rank 0 is missing on rank 1"),
            ({"w": torch.ones(2), **({"b": torch.ones(1)} if odd else {})}, "'b' of rank 1 is missing on rank 0"),
            ([("a", torch.ones(1)), ("b", torch.ones(1))][:: -1 if odd else 1], "a different order"),
        ]
        for params, text in cases:
            with pytest.raises(hvd.MismatchError, match=text):
                hvd.broadcast_parameters(params)
        assert hvd.allgather_object(hvd.rank()) == [0, 1]

    two.run(fn)


def test_parameters_of_a_wrong_kind(world: Ranks) -> None:
    def fn() -> None:
        wrong: list[Any] = [model(0), torch.ones(3), None, 7, "weights", {"lr": 0.1}, [1, 2], [("w", None)]]
        for params in wrong:
            with pytest.raises(ValueError, match="a dict of tensors"):
                hvd.broadcast_parameters(params)
        with pytest.raises(ValueError, match="root_rank=9"):
            hvd.broadcast_parameters({}, root_rank=9)

    world.run(fn)


def test_text_in_the_state_of_an_optimizer(two: Ranks) -> None:
    def fn() -> None:
        param = torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([param], lr=0.1)
        mine = {"mode": "warm", "modes": ["a", ("b", 1)], "by": {"name": "c"}, "exact": torch.ones(1).double()}
        if hvd.rank() == 0:
            optimizer.state[param].update(mine)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        assert {**optimizer.state[param]} == mine
        assert optimizer.state[param]["exact"].dtype == torch.float64

    two.run(fn)


@pytest.mark.parametrize("kind", sorted(OPTIMIZERS))
@pytest.mark.parametrize("root_steps", [0, 3])
@pytest.mark.parametrize("other_steps", [0, 2])
def test_optimizer_state(two: Ranks, kind: str, root_steps: int, other_steps: int) -> None:
    def fn() -> Any:
        net = model(0)
        optimizer = OPTIMIZERS[kind](net.parameters())
        train(net, optimizer, root_steps if hvd.rank() == 1 else other_steps, seed=hvd.rank())
        if hvd.rank() == 1:
            optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"] * 0.5
            optimizer.param_groups[0]["initial_lr"] = 0.5
        weights, before = copy.deepcopy(net.state_dict()), copy.deepcopy(optimizer.state_dict())
        hvd.broadcast_optimizer_state(optimizer, root_rank=1)
        assert equal(net.state_dict(), weights)
        after = optimizer.state_dict()
        if hvd.rank() == 1:
            assert equal(after, before)
        everyones = hvd.allgather_object(copy.deepcopy(after))
        assert equal(everyones[0], everyones[1])
        assert bool(after["state"]) == (root_steps > 0) or kind in ("lbfgs", "adagrad", "sgd")
        assert after["param_groups"][0]["initial_lr"] == 0.5
        # and both continue alike
        hvd.broadcast_parameters(net.state_dict(), root_rank=1)
        train(net, optimizer, 2, seed=7)
        return {name: value.clone() for name, value in net.state_dict().items()}

    zero, one = two.run(fn)
    assert equal(zero, one)


def test_optimizer_parameter_groups(two: Ranks) -> None:
    def fn() -> tuple[Any, ...]:
        net = model(0)
        groups: list[dict[str, Any]] = [
            {"params": net[0].parameters(), "lr": 0.1 + hvd.rank()},
            {"params": net[2].parameters()},
        ]
        optimizer = torch.optim.SGD(groups, lr=0.5 + hvd.rank(), momentum=0.1 * hvd.rank())
        hvd.broadcast_optimizer_state(optimizer, root_rank=1)
        return [group["lr"] for group in optimizer.param_groups], optimizer.param_groups[1]["momentum"]

    assert two.run(fn) == [([1.1, 1.5], 0.1)] * 2


def test_optimizers_that_differ(two: Ranks) -> None:
    def fn() -> None:
        params = [torch.nn.Parameter(torch.ones(1)) for _ in range(2 + hvd.rank())]
        with pytest.raises(hvd.MismatchError, match=r"rank 1 has parameter groups of \[3\] parameters"):
            hvd.broadcast_optimizer_state(torch.optim.SGD(params, lr=0.1))
        with pytest.raises(ValueError, match=r"torch\.optim\.Optimizer"):
            hvd.broadcast_optimizer_state(params)  # type: ignore[arg-type]

    two.run(fn)


def test_distributed_optimizer_state(two: Ranks) -> None:
    def fn() -> None:
        net = model(0)
        optimizer = hvd.DistributedOptimizer(torch.optim.Adam(net.parameters()), net.named_parameters())
        features = torch.ones(4, 4)
        net(features).sum().backward()
        optimizer.step()
        if hvd.rank() == 0:
            for state in optimizer.state.values():
                state["exp_avg"].add_(1.0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        zero, one = hvd.allgather_object(copy.deepcopy(optimizer.state_dict()))
        assert equal(zero, one)

    two.run(fn)
