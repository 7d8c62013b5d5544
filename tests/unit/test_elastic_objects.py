"""What can be state, how it is named and assigned, and what a restore brings back; no world is needed."""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict, defaultdict
from typing import Any

import pytest
import torch

import spark_hvd.torch as hvd
from spark_hvd.elastic.skeleton import TensorTable, unflatten
from spark_hvd.elastic.state import ObjectState, State
from spark_hvd.torch.elastic import TorchState, get_handler_registry, set_handler_registry
from spark_hvd.torch.handlers import handler_of


def test_objects_are_restored_whole() -> None:
    state = ObjectState(bcast_object=hvd.broadcast_object, get_rank=hvd.rank, step=3, seen={"a": [1]})
    assert state.commits == -1
    state.step = 4
    state.restore()  # there is nothing to restore
    assert (state.step, state.commits) == (4, -1)
    state.save()
    for _ in range(2):  # a restore returns more than the copy itself
        state.seen["a"].append(2)
        state.step, state.other = 5, "not state"
        state.restore()
        assert (state.step, state.seen, state.other, state.commits) == (4, {"a": [1]}, "not state", 0)
    state.commit()  # in no world, with no launcher
    assert state.commits == 1


@pytest.mark.parametrize("name", ["save", "_x", "restore"])
def test_names_of_its_own(name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}' is an attribute of ObjectState itself"):
        ObjectState(**{name: 1})


@pytest.mark.parametrize("kind", [ObjectState, TorchState])
def test_a_value_may_be_called_commits(kind: Any) -> None:
    """As in Horovod programs, because Horovod does not count commits."""
    state = kind(commits=7, step=0)
    for _ in range(2):
        state.commits += 1
        state.commit()
    assert (state.commits, state._count) == (9, 1)
    state.commits = 20
    other = copy.deepcopy(state)
    state.restore()
    assert (state.commits, state._count) == (9, 1)
    assert (other.commits, other._count) == (20, 1)


def test_callbacks_come_after_reset() -> None:
    calls: list[str] = []

    class Mine(ObjectState):
        def reset(self) -> None:
            calls.append("reset")

    state = Mine(step=0)
    state.register_reset_callbacks([lambda: calls.append("first"), lambda: calls.append("second")])
    state.register_reset_callbacks([lambda: calls.append("third")])
    state.on_reset()
    assert calls == ["reset", "first", "second", "third"]
    for method in (State.save, State.restore, State.sync):
        with pytest.raises(NotImplementedError):
            method(state)


def test_tensors_in_objects() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    state = ObjectState(
        tensor=torch.arange(3),
        nested=OrderedDict(a=[torch.zeros(2, requires_grad=True)], b=(weight, weight)),
        by_default=defaultdict(list, x=[torch.tensor(True)]),
        lazily={"none": None},
    )
    state.save()
    state.tensor += 1
    state.nested["a"][0].data += 1
    state.by_default["y"].append(1)
    state.restore()
    assert state.tensor.tolist() == [0, 1, 2]
    assert type(state.nested) is OrderedDict
    assert state.nested["a"][0].requires_grad
    assert isinstance(state.nested["b"][0], torch.nn.Parameter)
    assert (state.by_default.default_factory, state.by_default["x"][0].item(), len(state.by_default)) == (list, True, 1)


class Averaged(torch.nn.Module):
    """Keeps its tensors, like torchmetrics' metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.total = torch.zeros(2)

    def get_extra_state(self) -> dict[str, torch.Tensor]:
        return {"total": self.total}

    def set_extra_state(self, state: dict[str, torch.Tensor]) -> None:
        self.total = state["total"]


def test_what_a_module_keeps_after_a_restore_is_not_the_commit() -> None:
    model = Averaged()
    state = TorchState(model)
    model.total += 1
    state.save()
    for _ in range(2):
        state.restore()
        assert model.total.tolist() == [1, 1]
        model.total += 5


def test_assignment_replaces_what_is_handled() -> None:
    first, second = torch.nn.Linear(2, 1), torch.nn.Linear(3, 1)
    state = TorchState(first, scaler=None)
    assert state.model is first
    assert state.optimizer is None
    state.save()
    before = copy.deepcopy(first.state_dict())
    state.model = second
    state.optimizer = torch.optim.SGD(second.parameters(), lr=0.1)
    state.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)  # type: ignore[attr-defined]
    with torch.no_grad():
        first.weight.zero_()
    state.restore()
    assert state.model is first
    assert (state.optimizer, state.scaler) == (None, None)
    assert torch.equal(first.weight, before["weight"])
    state.model = second
    state.save()
    with torch.no_grad():
        second.weight.zero_()
    state.restore()
    assert state.model is second
    assert second.weight.abs().sum() > 0


def test_an_optimizers_state_is_not_cast() -> None:
    param = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([param], lr=0.1)
    optimizer.state[param]["master"] = torch.tensor([1 / 3] * 3)
    state = TorchState(optimizer=optimizer, weights=param)
    state.save()
    kept = optimizer.state[param]["master"].clone()
    for _ in range(2):
        optimizer.state[param]["master"].zero_()
        state.restore()
        assert optimizer.state[param]["master"].dtype == torch.float32
        assert torch.equal(optimizer.state[param]["master"], kept)


def test_what_cannot_be_copied_is_named() -> None:
    state = ObjectState(fine=1, wrong=[torch.eye(2).to_sparse()])
    with pytest.raises(TypeError, match=r"'wrong': a tensor of layout torch\.sparse_coo"):
        state.save()
    state.wrong = [threading.Lock()]
    with pytest.raises(TypeError, match=r"'wrong': list cannot be copied: cannot pickle '_thread\.lock' object"):
        state.save()
    assert state.commits == -1


def test_handlers_of_users() -> None:
    calls: list[str] = []

    class Counter:
        count = 0

    class Handler(hvd.elastic.StateHandler):
        def save(self) -> None:
            calls.append(f"save {self.value.count}")

        def restore(self) -> None:
            calls.append("restore")

    class ByState(hvd.elastic.StateDictHandler):
        def state(self) -> Any:
            return self.value.count

        def load(self, state: Any) -> None:
            self.value.count = state

    class Other(Counter):
        pass

    registry = get_handler_registry()
    set_handler_registry([(Other, ByState), (Counter, Handler), *registry])
    try:
        counter, other = Counter(), Other()
        state = TorchState(counter=counter, other=other)
        state.save()
        counter.count = other.count = 5
        state.restore()
        assert calls == ["save 0", "restore"]
        assert (counter.count, other.count) == (5, 0)
        assert state.other is other
    finally:
        set_handler_registry(registry)
    with pytest.raises(NotImplementedError):
        hvd.elastic.StateHandler(1).sync()


def test_plain_values_have_no_handler_unless_users_say_so() -> None:
    class Table(dict[str, int]):
        def state_dict(self) -> dict[str, int]:
            return dict(self)

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.update(state)

    class Handler(hvd.elastic.StateHandler):
        pass

    assert [handler_of(value) for value in (None, 1, "a", (1,), [1], {"state_dict": 1}, Table)] == [None] * 7
    assert isinstance(handler_of(Table()), hvd.elastic.StateDictHandler)
    registry = get_handler_registry()
    set_handler_registry([(dict, Handler), *registry])
    try:
        assert isinstance(handler_of({}), Handler)
    finally:
        set_handler_registry(registry)


def test_skeletons_keep_what_has_no_tensor() -> None:
    tied = torch.ones(2)
    loop: list[Any] = [1]
    loop.append(loop)
    plain = {"x": [1, 2]}
    value = {"plain": plain, "tied": [tied, tied.view(2)], "other": tied[:1], "loop": loop}
    table = TensorTable()
    skeleton = table.flatten(value)
    assert skeleton["plain"] is plain
    assert len(table.tensors) == 2
    assert copy.deepcopy(skeleton)["tied"] == skeleton["tied"]
    assert skeleton["loop"][1] is loop
    again = unflatten(skeleton, lambda ref: table.tensors[ref.number])
    assert again["tied"][1].tolist() == [1, 1]
