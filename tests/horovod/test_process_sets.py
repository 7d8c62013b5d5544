"""Process sets: what they are, and every collective within one, next to others."""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path

import cloudpickle
import pytest
import torch

import spark_hvd.torch as hvd
from tests.horovod.support import (
    DIMS,
    MOVABLE,
    OPS,
    REDUCIBLE,
    LastingWorld,
    alive,
    check,
    everyones,
    halves,
    needs_gpus,
    reduced,
    rows_of_rank,
)

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def of_members(tensors: list[torch.Tensor], process_set: object) -> list[torch.Tensor]:
    return [tensors[rank] for rank in process_set.ranks]  # type: ignore[attr-defined]


def test_what_a_set_is(three: LastingWorld) -> None:
    def fn() -> list[int]:
        rank = hvd.rank()
        everyone = hvd.global_process_set
        assert (everyone.process_set_id, list(everyone.ranks), everyone.size(), everyone.rank()) == (
            0,
            [0, 1, 2],
            3,
            rank,
        )
        assert everyone.included()

        planned = hvd.ProcessSet([2, 0])
        assert planned.process_set_id is None
        assert list(planned.ranks) == [0, 2]
        assert hvd.remove_process_set(planned) is False
        assert hvd.add_process_set(planned) is planned
        single = hvd.add_process_set([1])
        assert isinstance(single, hvd.ProcessSet)
        assert list(single.ranks) == [1]

        ids = [planned.process_set_id, single.process_set_id]
        assert len({0, *ids}) == 3
        assert [planned.size(), single.size()] == [2, 1]
        assert planned.included() == (rank != 1)
        assert single.included() == (rank == 1)
        mine = planned if rank != 1 else single
        assert mine.rank() == {0: 0, 1: 0, 2: 1}[rank]
        assert "0, 2" in str(planned)

        with pytest.raises(ValueError, match="0, 2"):
            hvd.add_process_set([2, 0])
        assert hvd.remove_process_set(everyone) is False
        assert hvd.remove_process_set(planned) is True
        assert hvd.remove_process_set(single) is True
        assert hvd.remove_process_set(planned) is False
        assert planned.process_set_id is None
        return ids

    zero, one, two = three.run(fn)
    assert zero == one == two


def test_ranks_that_do_not_exist(three: LastingWorld) -> None:
    def fn() -> None:
        for ranks, text in (([0, 3], "3"), ([-1], "-1"), ([0, 0], "0")):
            with pytest.raises(ValueError, match=text):
                hvd.add_process_set(ranks)
        again = hvd.add_process_set([0, 1])
        if again.included():
            assert hvd.allreduce(torch.tensor([1]), op=hvd.Sum, process_set=again).tolist() == [2]
        assert hvd.remove_process_set(again)

    three.run(fn)


def test_allreduce(three: LastingWorld) -> None:
    def fn() -> None:
        with halves() as mine:
            for dtype, dim, op in itertools.product(REDUCIBLE, DIMS, OPS):
                tensors = everyones(dtype, *[5] * dim, most=3)
                result = hvd.allreduce(tensors[hvd.rank()], op=op, process_set=mine)
                check(result, reduced(of_members(tensors, mine), op))
            in_place = torch.tensor([2.0, 4.0])
            hvd.synchronize(hvd.allreduce_async_(in_place, op=hvd.Sum, process_set=mine))
            assert in_place.tolist() == [2.0 * mine.size(), 4.0 * mine.size()]

    three.run(fn)


def test_grouped_allreduce(three: LastingWorld) -> None:
    def fn() -> None:
        with halves() as mine:
            for dtype, dim in itertools.product(REDUCIBLE, DIMS):
                group = [everyones(dtype, *[5] * dim, seed=member) for member in range(5)]
                results = hvd.grouped_allreduce([member[hvd.rank()] for member in group], op=hvd.Sum, process_set=mine)
                for result, member in zip(results, group, strict=True):
                    check(result, reduced(of_members(member, mine), hvd.Sum))

    three.run(fn)


def test_allgather(three: LastingWorld) -> None:
    def fn() -> None:
        with halves() as mine:
            for dtype, dim in itertools.product(MOVABLE, DIMS):
                wholes = everyones(dtype, *[5] * dim)
                tensors = [whole[: rank + 1] for rank, whole in enumerate(wholes)]
                gathered = hvd.allgather(tensors[hvd.rank()], process_set=mine)
                check(gathered, torch.cat(of_members(tensors, mine)))
                group = hvd.grouped_allgather([tensors[hvd.rank()]] * 3, process_set=mine)
                for member in group:
                    check(member, torch.cat(of_members(tensors, mine)))

    three.run(fn)


def test_broadcast(three: LastingWorld) -> None:
    def fn() -> None:
        with halves() as mine:
            for root, dtype, dim in itertools.product(mine.ranks, MOVABLE, DIMS):  # roots are global ranks
                tensors = everyones(dtype, *[5] * dim)
                check(hvd.broadcast(tensors[hvd.rank()], root, process_set=mine), tensors[root])
                own = tensors[hvd.rank()].clone()
                assert hvd.broadcast_(own, root, process_set=mine) is own
                check(own, tensors[root])
            stranger = 1 if hvd.rank() % 2 == 0 else 0
            with pytest.raises(ValueError, match=f"root_rank={stranger}"):
                hvd.broadcast(torch.ones(2), stranger, process_set=mine)

    three.run(fn)


def test_alltoall(three: LastingWorld) -> None:
    def fn() -> None:
        with halves() as mine:
            for dtype, dim in itertools.product(MOVABLE, DIMS):
                count = mine.size()
                wholes = everyones(dtype, 9, *[2] * (dim - 1))
                tensors = [whole[: (rank + 1) * count] for rank, whole in enumerate(wholes)]
                splits = torch.tensor([hvd.rank() + 1] * count, dtype=torch.int32)
                received, counts = hvd.alltoall(tensors[hvd.rank()], splits, process_set=mine)
                expected = [tensors[rank].split(rank + 1)[mine.rank()] for rank in mine.ranks]
                check(received, torch.cat(expected))
                assert counts.tolist() == [rank + 1 for rank in mine.ranks]
                check(hvd.alltoall(tensors[hvd.rank()], process_set=mine), torch.cat(expected))

    three.run(fn)


def test_reducescatter(three: LastingWorld) -> None:
    def fn() -> None:
        with halves() as mine:
            for dtype, dim, op in itertools.product(REDUCIBLE, DIMS, (hvd.Sum, hvd.Average)):
                share = rows_of_rank(5, mine.size(), mine.rank())
                tensors = everyones(dtype, *[5] * dim)
                expected = reduced(of_members(tensors, mine), op)[share]
                check(hvd.reducescatter(tensors[hvd.rank()], op=op, process_set=mine), expected)
                for member in hvd.grouped_reducescatter([tensors[hvd.rank()]] * 3, op=op, process_set=mine):
                    check(member, expected)

    three.run(fn)


def test_sparse(three: LastingWorld) -> None:
    def fn() -> None:
        with halves() as mine:
            torch.manual_seed(hvd.rank())
            dense = torch.rand(17, 10)
            dense[dense < 0.8] = 0
            expected = hvd.allreduce(dense, process_set=mine)
            handle = hvd.sparse_allreduce_async(dense.to_sparse(), name="sparse", op=hvd.Average, process_set=mine)
            check(handle().to_dense(), expected, slack=1e-6)

    three.run(fn)


def test_objects(three: LastingWorld) -> None:
    def fn() -> None:
        with halves() as mine:
            expected = {"hello": 123, 0: [1, 2], "root": mine.ranks[-1]}
            obj = expected if hvd.rank() == mine.ranks[-1] else {}
            assert hvd.broadcast_object(obj, root_rank=mine.ranks[-1], process_set=mine) == expected
            assert hvd.allgather_object(hvd.rank(), process_set=mine) == list(mine.ranks)

    three.run(fn)


def test_barrier(three: LastingWorld, tmp_path: Path) -> None:
    def fn(folder: str) -> None:
        odd_is_through, zero_arrives = Path(folder, "odd"), Path(folder, "zero")
        with halves() as mine:
            if hvd.rank() == 1:
                hvd.barrier(process_set=mine)
                odd_is_through.touch()
            elif hvd.rank() == 0:
                deadline = time.monotonic() + 20
                while not odd_is_through.exists():  # the barrier of the odd ranks does not wait for this rank
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
                zero_arrives.touch()
                hvd.barrier(mine)
            else:
                hvd.barrier(mine)
                assert zero_arrives.exists()  # this rank's did

    three.run(fn, str(tmp_path))


def test_from_outside(three: LastingWorld) -> None:
    def fn() -> None:
        pair = hvd.add_process_set([0, 2])
        mine = torch.ones(2)
        if hvd.rank() == 1:
            for call in (
                lambda: hvd.allreduce(mine, process_set=pair),
                lambda: hvd.allreduce_async_(mine, process_set=pair),
                lambda: hvd.grouped_allreduce([mine], process_set=pair),
                lambda: hvd.allgather(mine, process_set=pair),
                lambda: hvd.broadcast(mine, 0, process_set=pair),
                lambda: hvd.alltoall(mine, process_set=pair),
                lambda: hvd.reducescatter(mine, process_set=pair),
                lambda: hvd.barrier(process_set=pair),
                lambda: hvd.broadcast_object(1, process_set=pair),
                lambda: hvd.allgather_object(1, process_set=pair),
            ):
                with pytest.raises(ValueError, match=r"(?s)(?=.*\b1\b)(?=.*0, 2)"):
                    call()
        else:
            assert hvd.allreduce(mine, op=hvd.Sum, process_set=pair).tolist() == [2.0, 2.0]
        alive()
        assert hvd.remove_process_set(pair)
        with pytest.raises(ValueError, match=r"0, 2"):
            hvd.allreduce(mine, process_set=pair)
        with pytest.raises(ValueError, match=r"0, 1"):
            hvd.allreduce(mine, process_set=hvd.ProcessSet([0, 1]))
        alive()

    three.run(fn)


def test_overlapping_sets_have_names_of_their_own(three: LastingWorld) -> None:
    def fn() -> None:
        rank = hvd.rank()
        sets = [hvd.add_process_set(ranks) for ranks in ([0, 1], [0, 2], [1, 2])]
        for step in range(3):
            order = [*sets, hvd.global_process_set]
            order = order[rank:] + order[:rank]  # a different order on every rank
            handles = {
                each.process_set_id: hvd.allreduce_async(
                    torch.tensor([10**rank + step]), op=hvd.Sum, name="same", process_set=each
                )
                for each in order
                if each.included()
            }
            for each in reversed(order):
                if each.included():
                    expected = sum(10**member + step for member in each.ranks)
                    assert hvd.synchronize(handles[each.process_set_id]).tolist() == [expected]
        assert all(hvd.remove_process_set(each) for each in sets)

    three.run(fn)


def test_mismatch_stays_within_the_set(three: LastingWorld) -> None:
    def fn() -> str:
        text = ""
        with halves() as mine:
            handle = hvd.allreduce_async(torch.ones(2), op=hvd.Sum, name="everyone's")
            if hvd.rank() == 1:
                assert hvd.allreduce(torch.ones(3), name="x", op=hvd.Sum, process_set=mine).tolist() == [1.0] * 3
            else:
                wrong = torch.ones(3, dtype=torch.float64 if hvd.rank() == 2 else torch.float32)
                with pytest.raises(hvd.MismatchError, match=r"(?s)float32.*float64") as caught:
                    hvd.allreduce(wrong, name="x", process_set=mine)
                text = str(caught.value)
                assert hvd.allreduce(torch.ones(3), name="x", op=hvd.Sum, process_set=mine).tolist() == [2.0] * 3
            assert hvd.synchronize(handle).tolist() == [3.0, 3.0]
        return text

    zero, _, two = three.run(fn)
    assert zero == two
    assert "2" in zero  # the world's rank, not the set's


def test_sets_given_to_init(three: LastingWorld) -> None:
    def fn() -> None:
        hvd.shutdown()
        pair, single = hvd.ProcessSet([0, 2]), hvd.ProcessSet([1])
        hvd.init(process_sets=[pair, single])
        mine = single if hvd.rank() == 1 else pair
        total = hvd.allreduce(torch.tensor([hvd.rank()]), op=hvd.Sum, process_set=mine)
        assert total.tolist() == [sum(mine.ranks)]
        hvd.shutdown()
        with pytest.raises(ValueError, match="0, 2"):
            hvd.init(process_sets=[hvd.ProcessSet([0, 2]), hvd.ProcessSet([2, 0])])
        if hvd.is_initialized():
            hvd.shutdown()
        hvd.init(process_sets="dynamic")
        alive()

    three.run(fn)


@needs_gpus(2)
def test_gpu(two: LastingWorld) -> None:
    def fn() -> None:
        device = torch.device("cuda", hvd.local_rank())
        with halves() as mine:
            own = torch.full((3,), 1.0 + hvd.rank(), device=device)
            assert hvd.allreduce(own, op=hvd.Sum, process_set=mine).tolist() == own.tolist()
            assert hvd.allreduce(own, op=hvd.Sum).tolist() == [3.0] * 3

    two.run(fn)
