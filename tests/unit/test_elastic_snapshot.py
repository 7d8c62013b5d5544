"""Commits copied in the background: exact, or void and reported; never torn, and without leaks."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import spark_hvd.torch as hvd
from spark_hvd.elastic import snapshot
from spark_hvd.transport.torch_private import copy_all
from tests.conftest import wait_until


class Gate:
    """Holds copies back until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.begun = threading.Event()
        monkeypatch.setattr(snapshot, "copy_all", self._copy)

    def _copy(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        if threading.current_thread() is not threading.main_thread():
            self.begun.set()
            assert self.open.wait(20)
        copy_all(targets, sources)


def make(**more: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    step(net, optimizer)
    state = hvd.elastic.TorchState(net, optimizer, **more)
    state.save()
    return net, optimizer, state


def forward(net: torch.nn.Module) -> None:
    net(torch.randn(8, 4)).square().mean().backward()


def step(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    forward(net)
    optimizer.step()


def values(*parts: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for part in parts:
        items = part.state_dict()
        items = [*items["state"].values()] if "state" in items else [items]
        found += [tensor.clone() for item in items for tensor in item.values()]
    return found


def assert_same(left: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        assert torch.equal(one, other)


def test_a_step_waits_for_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    net, optimizer, state = make(note=["a"])
    step(net, optimizer)
    state.note.append("b")
    before = values(net, optimizer)
    state.save()  # returns with the gate shut
    assert gate.begun.wait(5)
    state.note.append("c")
    forward(net)  # changes running averages, which are copied at once
    threading.Timer(0.2, gate.open.set).start()
    optimizer.step()
    assert gate.open.is_set()
    assert any(not torch.equal(*pair) for pair in zip(before, values(net, optimizer), strict=True))
    state.restore()
    assert_same(values(net, optimizer), before)
    assert (state.note, state.commits) == (["a", "b"], 1)
    assert all(param.grad is None for param in net.parameters())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda state: pickle.loads(pickle.dumps(state))])
def test_a_step_of_a_copied_state_waits_too(copied: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    net, optimizer, state = make(note=["a"])
    other = copied(state)
    gate = Gate(monkeypatch)
    step(other.model, other.optimizer)
    before = values(other.model, other.optimizer)
    other.save()
    assert gate.begun.wait(20)
    forward(other.model)
    threading.Timer(0.2, gate.open.set).start()
    other.optimizer.step()
    assert gate.open.is_set()
    other.restore()
    assert_same(values(other.model, other.optimizer), before)
    assert (other.commits, state.commits) == (1, 0)
    wanted = values(net, optimizer)
    step(net, optimizer)
    state.restore()
    assert_same(values(net, optimizer), wanted)


def test_copies_of_a_state_have_commits_and_callbacks_of_their_own() -> None:
    net, _, state = make(numbers=torch.zeros(2))
    other = copy.copy(state)
    other.numbers = torch.ones(2)
    other.restore()
    assert other.numbers.tolist() == [0, 0]
    other.model = torch.nn.Linear(1, 1)
    other.register_reset_callbacks([lambda: pytest.fail("of the other")])
    for number in range(1, 3):
        other.numbers = torch.full((2,), number)
        other.save()
    state.restore()
    state.on_reset()
    assert state.model is net
    assert (state.numbers.tolist(), state.commits, other.commits) == ([0, 0], 0, 2)
    state.save()
    state.restore()
    assert state.model is net


def test_restore_waits_for_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    net, optimizer, state = make()
    step(net, optimizer)
    before = values(net, optimizer)
    state.save()
    threading.Timer(0.2, gate.open.set).start()
    state.restore()
    assert state.commits == 1
    assert_same(values(net, optimizer), before)


@pytest.mark.parametrize("change", ["parameter", "state"])
def test_a_change_by_others_makes_a_commit_void(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    gate = Gate(monkeypatch)
    net, optimizer, state = make()
    before = values(net, optimizer)
    step(net, optimizer)
    state.save()
    assert gate.begun.wait(5)
    with torch.no_grad():
        if change == "parameter":
            net[2].weight.clamp_(-0.01, 0.01)  # type: ignore[operator]
        else:
            next(iter(optimizer.state.values()))["exp_avg"].zero_()
    gate.open.set()
    with pytest.warns(UserWarning, match="changed between state.commit"):
        optimizer.step()
    state.restore()
    assert state.commits == 0
    assert_same(values(net, optimizer), before)
    # from then on, that tensor is copied at once
    step(net, optimizer)
    before = values(net, optimizer)
    state.save()
    with torch.no_grad():
        if change == "parameter":
            net[2].weight.clamp_(-0.01, 0.01)  # type: ignore[operator]
        else:
            next(iter(optimizer.state.values()))["exp_avg"].zero_()
    step(net, optimizer)
    state.restore()
    assert state.commits == 1
    assert_same(values(net, optimizer), before)


def test_a_failed_copy_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    net, optimizer, state = make()
    before = values(net, optimizer)
    step(net, optimizer)

    def fail(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise OSError("no memory")
        copy_all(targets, sources)

    with monkeypatch.context() as patch:
        patch.setattr(snapshot, "copy_all", fail)
        state.save()
        with pytest.raises(RuntimeError, match="copying the state for a commit failed: no memory"):
            state.save()
    state.restore()
    assert state.commits == 0
    assert_same(values(net, optimizer), before)
    step(net, optimizer)
    before = values(net, optimizer)
    state.save()
    step(net, optimizer)
    state.restore()
    assert_same(values(net, optimizer), before)


def test_memory_is_allocated_twice_and_threads_end() -> None:
    net, optimizer, state = make()
    places = set()
    for _ in range(6):
        step(net, optimizer)
        state.save()
        commit = state._snapshots.last()
        places.add(commit.buffers[0].data_ptr())
    assert len(places) == 2
    wait_until(lambda: not any(thread.name == "spark_hvd commit" for thread in threading.enumerate()))


def test_hooks_go_with_the_state() -> None:
    net, optimizer, state = make()
    assert len(optimizer._optimizer_step_pre_hooks) == 1
    other = torch.optim.SGD(net.parameters(), lr=0.1)
    state.optimizer = other
    assert (len(optimizer._optimizer_step_pre_hooks), len(other._optimizer_step_pre_hooks)) == (0, 1)
    state.restore()
    assert state.optimizer is optimizer
    assert (len(optimizer._optimizer_step_pre_hooks), len(other._optimizer_step_pre_hooks)) == (1, 0)
    del state
    gc.collect()
    assert len(optimizer._optimizer_step_pre_hooks) == 0


def test_two_optimizers_wait_for_each_others_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    nets = [torch.nn.Linear(3, 3) for _ in range(2)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in nets]
    state = hvd.elastic.TorchState(nets[0], optimizers[0], other=nets[1], second=optimizers[1])
    state.save()
    before = values(*nets, *optimizers)
    state.save()
    for net, optimizer in zip(nets, optimizers, strict=True):
        net(torch.ones(3)).sum().backward()
        gate.open.set()
        optimizer.step()
    state.restore()
    assert_same(values(*nets, *optimizers), before)
    assert state.commits == 1
