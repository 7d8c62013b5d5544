"""ShardedEmbedding on real ranks; the oracle is an nn.Embedding in one process on all rows."""

from __future__ import annotations

import copy
import io
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn

import spark_hvd.torch as hvd
from spark_hvd import run_elastic_local
from tests.ranks import RankError, Ranks, ranks

cloudpickle.register_pickle_by_value(sys.modules[__name__])

ROWS, DIM, BATCH, STEPS = 53, 4, 16, 5
MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.5),
    "SparseAdam": lambda params: torch.optim.SparseAdam(list(params), lr=0.1),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "RowWiseAdagrad": lambda params: hvd.RowWiseAdagrad(params, lr=0.1),
}


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def world(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with ranks(request.param) as world:
        yield world


def batch(rank: int, step: int, rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(rows, (BATCH, 3), generator=generator), torch.randn(BATCH, generator=generator)


class Net(nn.Module):
    """Two tables, looked up together or one by one, and a layer."""

    def __init__(self, sharded: bool, together: bool = True, sparse: bool = True) -> None:
        super().__init__()
        self.together = sharded and together
        sizes = {"first": (ROWS, DIM), "second": (ROWS // 2, 2 * DIM)}
        torch.manual_seed(3)
        for name, (rows, dim) in sizes.items():
            if sharded:
                table: nn.Module = hvd.ShardedEmbedding(rows, dim, name=name, padding_idx=5, sparse=sparse)
            else:
                table = nn.Embedding(rows, dim, padding_idx=5, sparse=sparse)
            setattr(self, name, table)
        torch.manual_seed(4)
        self.layer = nn.Linear(3 * (DIM + 2 * DIM), 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        tables, wanted = [self.first, self.second], [ids, ids % (ROWS // 2)]
        if self.together:
            rows = hvd.look_up(tables, wanted)
        else:
            rows = [table(each) for table, each in zip(tables, wanted, strict=True)]
        return self.layer(torch.cat([each.flatten(1) for each in rows], 1)).squeeze(1)


def tables_of(model: Net) -> list[nn.Parameter]:
    return [model.first.weight, model.second.weight]


def test_trains_as_one_process_does(world: Ranks) -> None:
    def fn(maker: str, together: bool) -> None:
        model, oracle = Net(True, together), Net(False)
        model.load_state_dict(oracle.state_dict())  # whole tables
        optimizers = [
            hvd.DistributedOptimizer(MAKERS[maker](tables_of(model))),
            hvd.DistributedOptimizer(torch.optim.SGD(model.layer.parameters(), lr=0.1)),
        ]
        plain = [MAKERS[maker](tables_of(oracle)), torch.optim.SGD(oracle.layer.parameters(), lr=0.1)]
        for step in range(STEPS):
            ids, wanted = batch(hvd.rank(), step)
            loss = (model(ids) - wanted).square().mean()
            everything = [batch(rank, step) for rank in range(hvd.size())]
            all_ids, all_wanted = (torch.cat(each) for each in zip(*everything, strict=True))
            whole_loss = (oracle(all_ids) - all_wanted).square().mean()
            torch.testing.assert_close(hvd.allreduce(loss.detach()), whole_loss.detach(), rtol=1e-6, atol=1e-6)
            for each, value in ((optimizers, loss), (plain, whole_loss)):
                for one in each:
                    one.zero_grad()
                value.backward()
            for table, other in zip([model.first, model.second], tables_of(oracle), strict=True):
                ours, theirs = table.weight.grad.to_dense(), table.cut.take(other.grad.to_dense())
                torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
            for one in (*optimizers, *plain):
                one.step()
        whole = hvd.whole_state_dict(model)
        for name, value in oracle.state_dict().items():
            torch.testing.assert_close(whole[name], value, rtol=1e-5, atol=1e-6)

    for maker in MAKERS:
        world.run(fn, maker, True)
    world.run(fn, "SGD", False)


def test_one_optimizer_for_all_and_dense_gradients(world: Ranks) -> None:
    def fn(op: Any) -> None:
        model, oracle = Net(True, sparse=False), Net(False, sparse=False)
        model.load_state_dict(oracle.state_dict())
        optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()), model.named_parameters(), op=op)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        ids, wanted = batch(hvd.rank(), 0)
        (model(ids) - wanted).square().mean().backward()
        everything = [batch(rank, 0) for rank in range(hvd.size())]
        all_ids, all_wanted = (torch.cat(each) for each in zip(*everything, strict=True))
        times = hvd.size() if op is hvd.Sum else 1
        (times * (oracle(all_ids) - all_wanted).square().mean()).backward()
        optimizer.synchronize()
        torch.testing.assert_close(model.first.weight.grad, model.first.cut.take(oracle.first.weight.grad))
        torch.testing.assert_close(model.layer.weight.grad, oracle.layer.weight.grad)

    world.run(fn, hvd.Average)
    world.run(fn, hvd.Sum)


def test_bags(world: Ranks) -> None:
    def fn(mode: str) -> None:
        table = hvd.ShardedEmbedding(ROWS, DIM, mode=mode, padding_idx=1)
        oracle = nn.EmbeddingBag(ROWS, DIM, mode=mode, padding_idx=1, sparse=True)
        hvd.broadcast_parameters(oracle.state_dict())
        table.load_state_dict(oracle.state_dict())
        ids = batch(hvd.rank(), 0)[0]
        torch.testing.assert_close(table(ids), oracle(ids))
        offsets = torch.tensor([0, 4, 4, 10])
        torch.testing.assert_close(table(ids.flatten(), offsets), oracle(ids.flatten(), offsets))
        with pytest.raises(ValueError, match="bags need"):
            table(ids.flatten())

    world.run(fn, "sum")
    world.run(fn, "mean")


def test_a_rank_without_ids_and_ids_of_32_bits(world: Ranks) -> None:
    def fn() -> None:
        table = hvd.ShardedEmbedding(ROWS, DIM)
        ids = torch.arange(4 if hvd.rank() else 0, dtype=torch.int32)
        started = hvd.look_up_async([table], [ids])
        [rows] = started.wait()
        assert rows.shape == (len(ids), DIM)
        rows.sum().backward()
        whole = torch.zeros(ROWS, DIM)
        whole[:4] = (hvd.size() - 1) / hvd.size()
        torch.testing.assert_close(table.weight.grad.to_dense(), table.cut.take(whole))

    world.run(fn)


def test_batches_of_any_size_in_turn(world: Ranks) -> None:
    def fn() -> None:
        oracle = nn.Embedding(ROWS, DIM)
        hvd.broadcast_parameters(oracle.state_dict())
        table = hvd.ShardedEmbedding(ROWS, DIM)
        table.load_state_dict(oracle.state_dict())
        for step, count in enumerate([3, 50, 1, 0, 200, 7, 7, 200]):
            generator = torch.Generator().manual_seed(step * 10 + hvd.rank())
            ids = [torch.randint(ROWS, (count * (hvd.rank() + number),), generator=generator) for number in (1, 2)]
            started = [hvd.look_up_async([table, table], [each, each[:1]]) for each in ids]
            for each, one in zip(ids, started, strict=True):
                first, second = one.wait()
                assert torch.equal(first, oracle(each))
                assert torch.equal(second, oracle(each[:1]))

    world.run(fn)


def test_rows_differ_and_shares_are_even(world: Ranks) -> None:
    def fn() -> int:
        torch.manual_seed(1)  # on every rank
        table = hvd.ShardedEmbedding(1000, DIM)
        rows = hvd.whole_state_dict(table)["weight"]
        assert len(rows.unique(dim=0)) == 1000
        assert hvd.whole_state_dict(table, root_rank=0) is None or hvd.rank() == 0
        return table.weight.nbytes

    sizes = world.run(fn)
    assert max(sizes) <= 1.04 * 1000 * DIM * 4 / world.size


def test_an_id_beyond_the_table(world: Ranks) -> None:
    def fn(bad: int) -> str:
        table = hvd.ShardedEmbedding(ROWS, DIM, name="movies")
        ids = torch.tensor([3, bad if hvd.rank() == 1 else 4])
        with pytest.raises(IndexError if hvd.rank() == 1 else hvd.CollectiveError) as caught:
            table(ids)
        table(torch.tensor([1, 2]))  # the ranks are still in step
        return str(caught.value)

    other, own = world.run(fn, ROWS)[:2]
    assert "the id 53 is not in the table 'movies', whose 53 rows are 0 to 52" in own
    assert "rank 1" in other
    assert "the id -1" in world.run(fn, -1)[1]


def test_wrong_arguments(world: Ranks) -> None:
    def fn() -> None:
        with pytest.raises(ValueError, match="a row for each"):
            hvd.ShardedEmbedding(1, DIM, name="tiny")
        with pytest.raises(ValueError, match="padding_idx=60"):
            hvd.ShardedEmbedding(ROWS, DIM, padding_idx=60)
        with pytest.raises(ValueError, match="mode='max'"):
            hvd.ShardedEmbedding(ROWS, DIM, mode="max")
        table = hvd.ShardedEmbedding(ROWS, DIM)
        with pytest.raises(TypeError, match="float32"):
            table(torch.zeros(3))
        half = hvd.ShardedEmbedding(ROWS, DIM, dtype=torch.float16, name="half")
        with pytest.raises(ValueError, match=r"'half' is torch\.float16"):
            hvd.look_up([table, half], [torch.zeros(1).long()] * 2)
        with pytest.raises(ValueError, match="2 tables got ids of 1"):
            hvd.look_up([table, half], [torch.zeros(1).long()])
        with pytest.raises(RuntimeError, match="load a whole state"):
            table.load_state_dict({"weight": torch.zeros(7, DIM)})
        with pytest.raises(ValueError, match="lr=-1"):
            hvd.RowWiseAdagrad(table.parameters(), lr=-1)

    world.run(fn)


def test_what_would_save_a_part_as_the_whole(world: Ranks, tmp_path: Path) -> None:
    def fn() -> None:
        model = nn.Sequential(hvd.ShardedEmbedding(ROWS, DIM))
        with pytest.raises(ValueError, match=r"'0.weight' for a whole ShardedEmbedding"):
            hvd.elastic.TorchState(model=model)
        with pytest.raises(ValueError, match="save_sharded would take"):
            hvd.checkpoint.save_sharded(str(tmp_path), model, step=1)
        with pytest.raises(ValueError, match=r"save would take this rank's rows of 'model.0.weight'"):
            hvd.checkpoint.save(str(tmp_path), {"model": model.state_dict()}, 1)
        with pytest.raises(ValueError, match="TorchState would take"):
            hvd.elastic.TorchState(optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        hvd.checkpoint.save(str(tmp_path), {"model": hvd.whole_state_dict(model, 0) or {}}, 2)
        before = model[0].weight.detach().clone()
        saved = hvd.checkpoint.load(str(tmp_path))
        assert saved is not None
        model.load_state_dict(saved.state["model"])
        assert torch.equal(model[0].weight, before)

    world.run(fn)


def test_rows_of_another_rank_are_not_loaded_as_mine(world: Ranks) -> None:
    def fn() -> None:
        model = nn.Sequential(hvd.ShardedEmbedding(12, DIM))  # the same number of rows on each rank
        before = model[0].weight.detach().clone()
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        model.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
        of_rank_0 = torch.load(io.BytesIO(hvd.broadcast_object(file.getvalue(), 0)), weights_only=True)
        if hvd.rank():
            with pytest.raises(RuntimeError, match=rf"has those of rank 0 of {hvd.size()}: load a whole state"):
                model.load_state_dict(of_rank_0)
        assert torch.equal(model[0].weight, before)

    world.run(fn)


def test_copies_are_tables_too(world: Ranks) -> None:
    def fn() -> None:
        table = hvd.ShardedEmbedding(ROWS, DIM).double()
        twin = copy.deepcopy(table)
        before = twin.weight.detach().clone()
        hvd.broadcast_parameters(twin.state_dict())  # shapes differ if ROWS is odd
        assert torch.equal(twin.weight, before)
        assert twin(torch.tensor([1])).dtype is torch.float64

    world.run(fn)


def train_and_save() -> bytes | None:
    model, optimizer = made()
    steps(model, optimizer, 0, 2)
    states = hvd.whole_state_dict(model, 0), hvd.whole_state_dict(optimizer, 0)
    if hvd.rank():
        return None
    file = io.BytesIO()
    torch.save(states, file)
    return file.getvalue()


def load_and_train(saved: bytes) -> dict[str, torch.Tensor]:
    model, optimizer = made()
    states = torch.load(io.BytesIO(saved), weights_only=True)
    hvd.load_whole_state_dict(model, states[0])
    hvd.load_whole_state_dict(optimizer, states[1])
    steps(model, optimizer, 2, 4)
    return {name: value.clone() for name, value in hvd.whole_state_dict(model).items()}


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    table = hvd.ShardedEmbedding(ROWS, DIM)
    table.load_state_dict({"weight": torch.randn(ROWS, DIM)})
    return table, hvd.DistributedOptimizer(torch.optim.SparseAdam(table.parameters(), lr=0.1))


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, end: int) -> None:
    """The same batches for any number of ranks."""
    for step in range(first, end):
        ids = torch.randint(ROWS, (12,), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(ids[hvd.rank() :: hvd.size()]).square().mean().backward()
        optimizer.step()


def test_a_whole_state_goes_on_with_any_number_of_ranks(world: Ranks) -> None:
    saved = world.run(train_and_save)[0]
    ours = world.run(load_and_train, saved)[0]
    with ranks(1) as one:
        alone = one.run(load_and_train, saved)[0]
    torch.testing.assert_close(ours, alone, rtol=1e-5, atol=1e-5)
    oracle = nn.Embedding(ROWS, DIM)
    oracle.load_state_dict(ours)


def test_a_table_that_is_whole_is_cut() -> None:
    table = hvd.ShardedEmbedding(ROWS, DIM)  # on the driver
    ids = torch.tensor([[2, 7]])
    rows = table(ids)
    assert rows.shape == (1, 2, DIM)
    with pytest.raises(IndexError, match="the id 99"):
        table(ids + 92)

    def fn() -> None:
        with pytest.raises(ValueError, match="cut_again"):
            table(ids)
        table.cut_again()
        torch.testing.assert_close(table(ids), rows)

    with ranks(2) as world:
        world.run(fn)


def test_a_rank_lost_in_a_look_up() -> None:
    def fn() -> None:
        table = hvd.ShardedEmbedding(ROWS, DIM)
        table(torch.tensor([1]))
        if hvd.rank() == 1:
            import os

            os._exit(3)
        table(torch.tensor([1]))

    with pytest.raises(RankError, match="CollectiveError"), ranks(2) as world:
        world.run(fn)


def test_ranks_lost_between_steps_and_while_tables_are_cut_again(tmp_path: Path) -> None:
    """The remaining ranks build the tables from the last whole state, whatever their number."""
    kept = tmp_path / "whole.pt"

    def train() -> tuple[int, dict[str, torch.Tensor]]:
        import os
        import signal

        def killed_once(name: str) -> None:
            if not (kept.parent / name).exists():
                (kept.parent / name).touch()
                os.kill(os.getpid(), signal.SIGKILL)

        @hvd.elastic.run
        def steps(state: Any) -> tuple[int, dict[str, torch.Tensor]]:
            table, step = hvd.ShardedEmbedding(ROWS, 1, initialize=nn.init.zeros_), 0
            if kept.exists():
                saved = torch.load(kept)
                if hvd.rank() == 0:
                    killed_once("while tables are cut again")
                table.load_state_dict(saved["table"])
                step = saved["step"]
            optimizer = torch.optim.SGD([table.weight], lr=1.0)
            while step < 6:
                optimizer.zero_grad()
                (-table(torch.arange(ROWS)).sum()).backward()
                optimizer.step()
                step += 1
                whole = hvd.whole_state_dict(table, root_rank=0)
                if hvd.rank() == 0:
                    torch.save({"table": whole, "step": step}, f"{kept}.new")
                    os.replace(f"{kept}.new", kept)
                if step == 3 and hvd.rank() == 1:
                    killed_once("between steps")
                state.commit()
            return step, hvd.whole_state_dict(table)

        return steps(hvd.elastic.ObjectState())

    results = run_elastic_local(train, num_proc=3, min_num_proc=1, max_num_proc=3)
    assert {path.name for path in tmp_path.iterdir()} == {kept.name, "between steps", "while tables are cut again"}
    for step, whole in results:
        assert step == 6
        torch.testing.assert_close(whole["weight"], torch.full((ROWS, 1), 6.0))
