"""State on real ranks: bitwise equal after a sync, restored as it was, and interrupted everywhere at once."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import pytest
import torch

import spark_hvd.torch as hvd
from spark_hvd.world import launcher as elastic_launcher
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
    """Tied weights, buffers of several dtypes, 0-dim and empty tensors, and state that is not a tensor."""

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
    """Return whether nested state is bitwise equal, dtypes included."""
    if isinstance(left, torch.Tensor):
        return (left.dtype, left.shape) == (right.dtype, right.shape) and torch.equal(_bytes(left), _bytes(right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    return type(left) is type(right) and bool(left == right)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def contents(state: Any) -> dict[str, Any]:
    """Return a copy of everything, to compare."""
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
    numbers = {"seed": [seed, "text"], "tensor": [torch.arange(3) + seed, torch.tensor(float("nan"))]}
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
        elif hvd.rank() == 1:  # one that was in the world, but missed a commit
            state.save()
            train(state.model, state.optimizer, 1)
        weight = state.model.first.weight
        before = contents(state)
        state.sync()
        after = contents(state)
        train(state.model, state.optimizer, 1)  # must not change what was saved
        state.numbers["seed"] = None
        state.restore()
        assert state.model.last.weight is state.model.first.weight is weight
        assert same(contents(state), after)
        train(state.model, state.optimizer, 2)
        return before, after, contents(state)

    results = three.run(fn)
    root = results[latest][0]
    assert root["commits"] == 2
    for _, after, later in results:
        assert same(after, root)
        assert same(later, results[0][2])


def test_first_sync_is_the_lowest_ranks(two: Ranks) -> None:
    def fn() -> Any:
        state = make_state(hvd.rank(), "momentum", steps=hvd.rank())
        before = contents(state)
        state.sync()
        return before, contents(state)

    (before, first), (_, second) = two.run(fn)
    assert same(first, second)
    assert (before.pop("commits"), first.pop("commits")) == (-1, 0)
    assert same(before, first)


def test_memory_that_two_tensors_share_on_a_receiver(two: Ranks) -> None:
    def fn() -> None:
        memory = torch.full((6,), 9.0)
        mine = {"first": memory[:3], "second": memory[2:5], "third": memory}
        if hvd.rank() == 0:
            mine = {"first": torch.arange(3.0), "second": torch.arange(3.0) + 10, "third": torch.arange(6.0) + 20}
        state = hvd.elastic.ObjectState(**mine)
        state.sync()
        assert state.first.tolist() == [0, 1, 2]
        assert state.second.tolist() == [10, 11, 12]
        assert state.third.tolist() == [20, 21, 22, 23, 24, 25]

    two.run(fn)


def test_large_state_is_streamed(two: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    def fn() -> Any:
        from spark_hvd.elastic import sync as state_sync

        sizes: list[int] = []
        original = state_sync.broadcast_object

        def counted(obj: Any, root_rank: int) -> Any:
            sizes.append(len(cloudpickle.dumps(obj)))
            return original(obj, root_rank)

        state_sync.broadcast_object = counted  # type: ignore[assignment]
        try:
            state = hvd.elastic.ObjectState(tables=[torch.full((1000, 1000), hvd.rank(), dtype=torch.int16)] * 3)
            place = state.tables[0].data_ptr()
            state.sync()
        finally:
            state_sync.broadcast_object = original
        return max(sizes), int(state.tables[2].sum()), state.tables[1].data_ptr() == place

    assert all(size < 2000 and total == 0 and there for size, total, there in two.run(fn))


def unfreeze_and_restore() -> list[Any]:
    torch.manual_seed(1)
    net = torch.nn.Linear(4, 2)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([net.weight], lr=0.1, momentum=0.9))
    state = hvd.elastic.TorchState(net, optimizer)
    state.sync()
    train(net, optimizer, 1)
    state.commit()
    ends = []
    for _ in range(2):
        optimizer.add_param_group({"params": [net.bias], "lr": 0.01})
        train(net, optimizer, 2)
        ends.append(copy.deepcopy([net.state_dict(), optimizer.state_dict()]))
        state.restore()
    return [same(*ends), len(optimizer.param_groups), net.bias in optimizer.state, net.bias.grad]


def test_a_group_that_came_after_the_commit_goes_with_a_restore(two: Ranks) -> None:
    assert two.run(unfreeze_and_restore) == [[True, 1, False, None]] * 2


def bad_names() -> None:
    name = "here" if hvd.rank() == 0 else "there"
    hvd.elastic.ObjectState(**{name: 1}).sync()


def bad_kinds() -> None:
    model = torch.nn.Linear(2, 2) if hvd.rank() == 0 else None
    hvd.elastic.TorchState(model).sync()


def bad_shapes() -> None:
    hvd.elastic.TorchState(torch.nn.Linear(2, 2 + hvd.rank())).sync()


def bad_groups() -> None:
    layer = torch.nn.Linear(2, 2)
    params = [layer.weight] if hvd.rank() else [layer.weight, layer.bias]
    hvd.elastic.TorchState(layer, torch.optim.SGD(params, lr=0.1)).sync()


def bad_sparse() -> None:
    state = hvd.elastic.ObjectState(table=torch.eye(2))
    state.save()
    state.table = torch.eye(2).to_sparse() if hvd.rank() == 0 else torch.eye(2)
    state.sync()


def bad_pickle() -> None:
    import threading

    state = hvd.elastic.ObjectState(lock=None)
    state.save()
    state.lock = threading.Lock() if hvd.rank() == 0 else None
    state.sync()


@pytest.mark.parametrize(
    ("fn", "text"),
    [
        (bad_names, "MismatchError: state.sync(): 'here' is a plain object on rank 0, but missing on rank 1"),
        (bad_kinds, "MismatchError: state.sync(): 'model' is for a ModelStateHandler on rank 0, but a plain object on"),
        (
            bad_shapes,
            "state.sync(): rank 1 cannot load the state of rank 0: model: 'bias' is torch.float32 of shape (3,) here",
        ),
        (bad_groups, "optimizer: its parameter groups have [1] parameters here, [2] there"),
        (bad_sparse, "ValueError: state.sync(): rank 0 has state that cannot be sent: 'table': a tensor of layout"),
        (bad_pickle, "ValueError: broadcast_object: the object of rank 0 cannot be pickled"),
    ],
)
def test_what_does_not_fit_is_told_everywhere(two: Ranks, fn: Callable[[], None], text: str) -> None:
    for ok, error in two.outcomes(fn):
        assert not ok
        assert text in error
    assert two.run(lambda: hvd.broadcast_object(hvd.rank())) == [0, 0]  # the world still works


class Launcher:
    """The part of a launcher that commits need."""

    def __init__(self) -> None:
        self.update_wanted = False
        self.commits: list[int] = []

    def committed(self, commits: int) -> None:
        self.commits.append(commits)


@pytest.mark.parametrize(("who", "values"), [(0, {}), (1, {}), (1, {"commits": 20})])
def test_interrupt_comes_to_all_ranks_at_once(two: Ranks, who: int, values: dict[str, int]) -> None:
    def fn() -> Any:
        launcher = Launcher()
        elastic_launcher.install(launcher)  # type: ignore[arg-type]
        try:
            state = hvd.elastic.ObjectState(step=0, **values)
            state.sync()
            for step in range(10):
                state.step = step
                launcher.update_wanted = hvd.rank() == who and step >= 4
                try:
                    state.commit()
                except hvd.elastic.HostsUpdatedInterrupt:
                    return state.step, state.commits, launcher.commits
        finally:
            elastic_launcher.install(None)

    assert two.run(fn) == [(4, values.get("commits", 5), [1, 2, 3, 4, 5])] * 2


def test_ranks_that_record_different_progress_are_told(two: Ranks) -> None:
    def fn() -> None:
        elastic_launcher.install(Launcher())  # type: ignore[arg-type]
        try:
            sampler = hvd.elastic.ElasticSampler(range(100))
            state = hvd.elastic.TorchState(sampler=sampler)
            state.sync()
            sampler.record_batch(0, 4)
            state.commit()
            sampler.record_batch(1, 4 + hvd.rank())
            state.commit()
        finally:
            elastic_launcher.install(None)

    for ok, error in two.outcomes(fn):
        assert not ok
        assert (
            "MismatchError: state.check_host_updates(): state.sampler.processed_num is 16 on one rank and 18" in error
        )


def test_an_epoch_over_two_one_and_three_ranks(two: Ranks, three: Ranks) -> None:
    """Each sample is seen once, counting from the last commit, in blocks of twelve of one permutation."""

    def generation(given: Any, batches: int, committed: int) -> Any:
        sampler = hvd.elastic.ElasticSampler(range(103), seed=5)
        state = hvd.elastic.TorchState(sampler=sampler, seen=[])
        if given is not None and hvd.rank() == 0:  # a survivor
            sampler.load_state_dict(given[0])
            state.seen = given[1]
            state.save()
        state.sync()
        loader = torch.utils.data.DataLoader(range(103), batch_size=12 // hvd.size(), sampler=sampler)  # type: ignore[arg-type]
        for number, batch in enumerate(loader):
            if number == batches:
                break
            sampler.record_batch(number, len(batch))
            state.seen.append(sorted(hvd.allgather(batch).tolist()))
            if number < committed:
                state.commit()
        state.restore()
        return sampler.state_dict(), state.seen

    with ranks(1) as one:
        given = None
        for world, batches, committed in ((two, 4, 2), (one, 3, 1), (three, 2, 2), (two, 99, 99)):
            results = world.run(generation, given, batches, committed)
            assert all(result == results[0] for result in results)
            given = results[0]
    assert given is not None
    order = list(range(103))
    random.Random(5).shuffle(order)
    blocks = [sorted(order[start : start + 12]) for start in range(0, 103, 12)]
    blocks[-1] = sorted([*order[96:], order[0]])  # 7 remain for two ranks
    assert given == ({"epoch": 0, "processed_num": 103}, blocks)
