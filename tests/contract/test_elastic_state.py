"""State on real ranks: equal to the bit after a sync, as it was after a restore, and interrupted everywhere at once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import pytest
import torch

import spark_hvd.torch as hvd
from spark_hvd import elastic_launcher
from tests.ranks import Ranks, ranks

cloudpickle.register_pickle_by_value(sys.modules[__name__])

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True),
    "tensor_lr": lambda params: torch.optim.Adam(params, lr=torch.tensor(0.01), foreach=False, capturable=False),
    "lbfgs": lambda params: torch.optim.LBFGS(params, lr=0.5, history_size=3),
}


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with ranks(2) as started:
        yield started


@pytest.fixture(scope="module")
def three() -> Iterator[Ranks]:
    with ranks(3) as started:
        yield started


class Odd(torch.nn.Module):
    """Tied weights, buffers of several dtypes, 0-dim and empty tensors, and state that is no tensor."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = torch.nn.Linear(4, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.last = torch.nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.frozen = torch.nn.Parameter(torch.randn(3).bfloat16(), requires_grad=False)
        self.scale = torch.nn.Parameter(torch.tensor(float(seed + 1)))
        self.register_buffer("counts", torch.full((2, 2), seed))
        self.register_buffer("empty", torch.empty(0, 3))
        self.register_buffer("odd", torch.randn(4, 4).t())
        self.seen = {"seed": seed}

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.norm(self.first(rows))) * self.scale
        return out

    def get_extra_state(self) -> dict[str, int]:
        return self.seen

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state


def train(net: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        rows = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))

        def closure(rows: torch.Tensor = rows) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = net(rows).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]


def same(left: Any, right: Any) -> bool:
    """Equality to the bit of nested state, dtypes included."""
    if isinstance(left, torch.Tensor):
        return (
            isinstance(right, torch.Tensor)
            and (left.dtype, left.shape, left.layout) == (right.dtype, right.shape, right.layout)
            and left.numpy(force=True).tobytes() == right.numpy(force=True).tobytes()
            if left.dtype != torch.bfloat16
            else same(left.float(), right.float()) and right.dtype == left.dtype
        )
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    return type(left) is type(right) and bool(left == right)


def contents(state: Any) -> dict[str, Any]:
    """A copy of all there is, to compare."""
    import copy

    return copy.deepcopy(
        {
            "commits": state.commits,
            "model": dict(state.model.state_dict()),
            "optimizer": state.optimizer.state_dict(),
            "scheduler": state.scheduler.state_dict(),
            "numbers": state.numbers,
        }
    )


def make_state(seed: int, optimizer: str = "adam", steps: int = 0) -> Any:
    net = Odd(seed)
    made = OPTIMIZERS[optimizer]([param for param in net.parameters() if param.requires_grad])
    scheduler = torch.optim.lr_scheduler.StepLR(made, 1, gamma=0.5 + seed / 10)
    train(net, made, steps)
    for _ in range(steps):
        scheduler.step()
    numbers = {"seed": [seed, float("nan") if False else 1.5], "tensor": [torch.arange(3) + seed]}
    return hvd.elastic.TorchState(net, made, scheduler=scheduler, numbers=numbers)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("latest", [0, 2])
def test_sync_is_equal_to_the_bit(three: Ranks, optimizer: str, latest: int) -> None:
    def fn() -> Any:
        mine = hvd.rank() == latest
        state = make_state(hvd.rank(), optimizer, steps=2 if mine else 0)
        if mine:
            for _ in range(3):
                state.save()
        elif hvd.rank() == 1:
            state.save()
            train(state.model, state.optimizer, 1)
        before = contents(state)
        state.sync()
        after = contents(state)
        train(state.model, state.optimizer, 1)  # not into what was saved
        state.numbers["seed"] = None
        state.restore()
        assert state.model.last.weight is state.model.first.weight
        assert same(contents(state), after)
        train(state.model, state.optimizer, 2)
        return before, after, contents(state)

    results = three.run(fn)
    for before, after, later in results:
        if results[latest][0]["commits"] >= 0:
            assert same(after, results[latest][0])
            assert after["commits"] == 2
        assert same(later, results[0][2])
        del before


def test_interrupt_comes_to_all_ranks_at_once(two: Ranks) -> None:
    def fn() -> Any:
        class Launcher:
            def __init__(self) -> None:
                self.update_wanted = False
                self.commits: list[int] = []

            def committed(self, commits: int) -> None:
                self.commits.append(commits)

        launcher = Launcher()
        elastic_launcher.install(launcher)  # type: ignore[arg-type]
        try:
            state = hvd.elastic.ObjectState(step=0)
            state.sync()
            for step in range(10):
                state.step = step
                launcher.update_wanted = hvd.rank() == 0 and step >= 4
                try:
                    state.commit()
                except hvd.elastic.HostsUpdatedInterrupt:
                    return state.step, state.commits, launcher.commits
        finally:
            elastic_launcher.install(None)

    assert two.run(fn) == [(4, 5, [1, 2, 3, 4, 5])] * 2
