"""The rest: entering again, barriers, objects, handles, the timeline, flags, SyncBatchNorm, a world of one."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist

import spark_hvd.torch as hvd
from tests.horovod.support import LastingWorld, alive, lasting, needs_gpus
from tests.ranks import SECONDS, wait_until

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def one() -> Iterator[LastingWorld]:
    with lasting(1) as world:
        yield world


def test_who_am_i(three: LastingWorld) -> None:
    def fn() -> tuple[int, ...]:
        hvd.init()
        assert hvd.is_initialized()
        return hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()

    assert three.run(fn) == [(rank, 3, rank, 3, 0, 1) for rank in range(3)]


def test_again_and_again(three: LastingWorld) -> None:
    def fn() -> None:
        before = hvd.rank(), hvd.size()
        for turn in range(4):
            handle = hvd.allreduce_async(torch.tensor([1.0 + turn]), op=hvd.Sum, name="across")
            assert hvd.synchronize(handle).tolist() == [3.0 + 3 * turn]
            hvd.shutdown()
            assert not hvd.is_initialized()
            with pytest.raises(hvd.NotInitializedError):
                hvd.allreduce_async(torch.ones(1), name="across")
            hvd.init()
            assert hvd.is_initialized()
            assert (hvd.rank(), hvd.size()) == before

    three.run(fn)


def test_before_init() -> None:
    calls: list[Any] = [
        lambda: hvd.allreduce_async(torch.ones(1)),
        lambda: hvd.grouped_allreduce_async([torch.ones(1)]),
        lambda: hvd.allgather_async(torch.ones(1)),
        lambda: hvd.broadcast_async_(torch.ones(1), 0),
        lambda: hvd.alltoall_async(torch.ones(1)),
        lambda: hvd.reducescatter_async(torch.ones(1)),
        hvd.join,
        lambda: hvd.add_process_set([0]),
        lambda: hvd.start_timeline("nowhere"),
    ]
    assert not hvd.is_initialized()
    for call in calls:
        with pytest.raises(hvd.NotInitializedError, match=r"hvd\.init\(\)"):
            call()


def test_barrier(three: LastingWorld, tmp_path: Path) -> None:
    def fn(folder: str) -> None:
        for late in range(hvd.size()):
            arrived = Path(folder, str(late))
            if hvd.rank() == late:
                time.sleep(0.1)
                arrived.touch()
            assert hvd.barrier() is None
            assert arrived.exists()

    three.run(fn, str(tmp_path))


def test_barrier_among_others_in_flight(three: LastingWorld) -> None:
    def fn() -> None:
        scale = 1.0 + hvd.rank()
        handles = [
            hvd.broadcast_async(torch.eye(3) * scale, root_rank=0),
            hvd.allgather_async(torch.eye(5) * scale),
            hvd.allgather_async(torch.zeros(5, 5)),
            hvd.allreduce_async(torch.eye(5)),
        ]
        hvd.barrier()
        assert torch.equal(hvd.synchronize(handles[3]), torch.eye(5))
        assert torch.equal(hvd.synchronize(handles[2]), torch.zeros(15, 5))
        assert torch.equal(hvd.synchronize(handles[1]), torch.cat([torch.eye(5) * k for k in (1, 2, 3)]))
        assert torch.equal(hvd.synchronize(handles[0]), torch.eye(3))

    three.run(fn)


def test_handles(three: LastingWorld) -> None:
    def fn() -> None:
        handle = hvd.allreduce_async(torch.ones(3), op=hvd.Sum, name="handle")
        result = handle.wait(timeout=20)
        assert result.tolist() == [3.0] * 3
        assert handle.wait() is result  # as often as you like
        assert hvd.synchronize(handle) is result
        assert handle.poll() is True
        assert hvd.poll(handle) is True
        # a handle without references ends anyway
        for number in range(20):
            hvd.allreduce_async_(torch.ones(3), name=f"dropped{number}")
        for number in range(20):
            while True:
                try:
                    again = hvd.allreduce_async(torch.ones(3), op=hvd.Sum, name=f"dropped{number}")
                    break
                except hvd.DuplicateNameError:
                    time.sleep(0.001)  # its end reaches the ranks at different times
            assert hvd.synchronize(again).tolist() == [3.0] * 3

    three.run(fn)


def test_calls_are_sent_without_being_waited_for(three: LastingWorld, tmp_path: Path) -> None:
    def fn(folder: str) -> None:
        for busy in range(2):  # one is the coordinator's rank
            ended = Path(folder, str(busy))
            handle = hvd.allreduce_async(torch.ones(1), op=hvd.Sum, name=f"while {busy} is busy")
            if hvd.rank() == busy:
                wait_until(ended.exists, SECONDS)
            assert handle.wait().tolist() == [3.0]
            ended.touch()

    three.run(fn, str(tmp_path))


def test_objects(three: LastingWorld) -> None:
    def fn() -> None:
        expected = {"hello": 123, 0: [1, 2]}
        assert hvd.broadcast_object(expected if hvd.rank() == 0 else {}, root_rank=0) == expected
        mine = {"metric_val_1": hvd.rank(), **({"metric_val_2": 42} if hvd.rank() == 1 else {})}
        gathered = hvd.allgather_object(mine, name="metrics")
        assert gathered == [{"metric_val_1": 0}, {"metric_val_1": 1, "metric_val_2": 42}, {"metric_val_1": 2}]
        large = hvd.broadcast_object(bytes(5_000_000) if hvd.rank() == 2 else None, root_rank=2, name="large")
        assert large == bytes(5_000_000)

    three.run(fn)


def test_objects_beside_tensors_in_flight(three: LastingWorld) -> None:
    def fn() -> None:
        rank = hvd.rank()
        handles = [hvd.allreduce_async(torch.full((1000,), float(n)), op=hvd.Sum, name=f"n{n}") for n in range(30)]
        assert hvd.allgather_object(rank * "x") == ["", "x", "xx"]
        assert hvd.broadcast_object(rank, root_rank=1) == 1
        hvd.broadcast_parameters({"weight": torch.ones(3)}, root_rank=0)
        assert [hvd.synchronize(handle)[0].item() for handle in handles] == [3.0 * n for n in range(30)]

    three.run(fn)


def test_everything_at_once_in_any_order(three: LastingWorld) -> None:
    def fn() -> None:
        import random

        rank = hvd.rank()
        starts = {
            "a": lambda: hvd.allreduce_async(torch.tensor([rank]), op=hvd.Sum, name="a"),
            "b": lambda: hvd.allgather_async(torch.full((rank,), rank), name="b"),
            "c": lambda: hvd.broadcast_async(torch.tensor([rank]), 2, name="c"),
            "d": lambda: hvd.alltoall_async(torch.arange(3) + 10 * rank, name="d"),
            "e": lambda: hvd.reducescatter_async(torch.arange(3), op=hvd.Sum, name="e"),
            "f": lambda: hvd.grouped_allreduce_async([torch.tensor([1]), torch.tensor([2.0])], op=hvd.Max, name="f"),
            "g": lambda: hvd.grouped_allgather_async([torch.tensor([rank])] * 2, name="g"),
            "h": lambda: hvd.broadcast_async_(torch.tensor([rank + 5]), 0, name="h"),
        }
        expected = {
            "a": [3],
            "b": [1, 2, 2],
            "c": [2],
            "d": [rank, 10 + rank, 20 + rank],
            "e": [3 * rank],
            "f": [[1], [2.0]],
            "g": [[0, 1, 2]] * 2,
            "h": [5],
        }
        for seed in range(10):
            names = list(starts)
            random.Random(100 * seed + rank).shuffle(names)
            handles = {name: starts[name]() for name in names}
            random.Random(100 * seed + rank + 50).shuffle(names)
            for name in names:
                result = hvd.synchronize(handles[name])
                if name == "d":
                    result = result[0]
                values = [tensor.tolist() for tensor in result] if isinstance(result, list) else result.tolist()
                assert values == expected[name], name

    three.run(fn)


def test_timeline(three: LastingWorld, tmp_path: Path) -> None:
    def fn(path: str, mark_cycles: bool) -> None:
        hvd.start_timeline(path, mark_cycles=mark_cycles)
        assert hvd.allreduce(torch.tensor([1.0, 2.0, 3.0]), op=hvd.Sum, name="test_allreduce").tolist() == [3, 6, 9]
        hvd.allgather(torch.ones(1), name="test_allgather")
        hvd.broadcast(torch.ones(1), 0, name="test_broadcast")
        time.sleep(0.2)
        hvd.stop_timeline()
        hvd.barrier()  # rank 0 has stopped the recording, for all
        hvd.allreduce(torch.tensor([1.0]), name="after_the_end")

    for turn, mark_cycles in enumerate((True, True, False, True)):  # started and stopped again and again
        path = tmp_path / f"{turn}.json"
        three.run(fn, str(path), mark_cycles)
        text = path.read_text()
        events = json.loads(text)
        assert isinstance(events, list)
        for word in ("test_allreduce", "NEGOTIATE_ALLREDUCE", '"ALLREDUCE"', "test_allgather", "test_broadcast"):
            assert word in text, word
        assert ("CYCLE_START" in text) == mark_cycles
        assert "after_the_end" not in text
        for event in events:
            assert {"ph"} <= event.keys() or event == {}
        begun = sum(event.get("ph") == "B" for event in events)
        assert begun == sum(event.get("ph") == "E" for event in events)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.json", "1.json", "2.json", "3.json"]  # rank 0's only


def test_timeline_started_twice(three: LastingWorld, tmp_path: Path) -> None:
    def fn(path: str) -> None:
        hvd.start_timeline(path)
        if hvd.rank() == 0:  # its calls count
            with pytest.raises(ValueError, match="stop_timeline"):
                hvd.start_timeline(path)
        for _ in range(2):
            hvd.allreduce(torch.ones(3), name="test_allreduce")
        time.sleep(0.1)
        hvd.stop_timeline()
        hvd.barrier()

    path = tmp_path / "timeline.json"
    three.run(fn, str(path))
    assert isinstance(json.loads(path.read_text()), list)
    assert "test_allreduce" in path.read_text()


def test_flags() -> None:
    for flag in (
        hvd.mpi_enabled,
        hvd.mpi_built,
        hvd.gloo_enabled,
        hvd.gloo_built,
        hvd.ddl_built,
        hvd.ccl_built,
        hvd.cuda_built,
        hvd.rocm_built,
    ):
        assert isinstance(flag(), bool), flag
    assert hvd.gloo_built() == dist.is_gloo_available()
    assert (hvd.nccl_built() > 0) == dist.is_nccl_available()
    assert hvd.cuda_built() == (torch.version.cuda is not None)
    assert hvd.rocm_built() == (torch.version.hip is not None)
    assert not hvd.ddl_built()
    assert not hvd.ccl_built()


def test_flags_in_a_world(three: LastingWorld) -> None:
    def fn() -> tuple[bool, bool]:
        if not hvd.mpi_enabled():
            with pytest.raises(ValueError, match="MPI"):
                hvd.mpi_threads_supported()
        return hvd.gloo_enabled(), hvd.mpi_enabled()

    assert three.run(fn) == [(True, False)] * 3


def share_of(batch: torch.Tensor, counts: list[int]) -> torch.Tensor:
    return batch.split(counts)[hvd.rank()].clone().requires_grad_()


@pytest.mark.parametrize(
    "options",
    [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}, {"eps": 0.1, "momentum": 0.3}],
    ids=lambda options: "-".join(options) or "plain",
)
def test_sync_batch_norm(three: LastingWorld, options: dict[str, Any]) -> None:
    def fn(options: dict[str, Any]) -> None:
        shapes: list[tuple[type[torch.nn.Module], list[int]]] = [
            (torch.nn.BatchNorm1d, [9, 4]),
            (torch.nn.BatchNorm1d, [9, 4, 2]),
            (torch.nn.BatchNorm2d, [9, 4, 3, 2]),
        ]
        counts = [2, 6, 1]
        for kind, shape in shapes:
            torch.manual_seed(0)
            ours, oracle = hvd.SyncBatchNorm(4, **options).double(), kind(4, **options).double()
            if ours.affine:
                torch.nn.init.normal_(oracle.weight)
                torch.nn.init.normal_(oracle.bias)
            ours.load_state_dict(oracle.state_dict())
            for _ in range(2):
                whole = torch.randn(shape, dtype=torch.float64).mul(3).add(1).requires_grad_()
                factors = torch.randn(shape, dtype=torch.float64)
                mine = share_of(whole.detach(), counts)
                result, expected = ours(mine), oracle(whole)
                torch.testing.assert_close(result, expected.split(counts)[hvd.rank()])
                ours.zero_grad()
                oracle.zero_grad()
                (result * factors.split(counts)[hvd.rank()]).sum().backward()
                (expected * factors).sum().backward()
                torch.testing.assert_close(mine.grad, whole.grad.split(counts)[hvd.rank()])
                for param, other in zip(ours.parameters(), oracle.parameters(), strict=True):
                    torch.testing.assert_close(hvd.allreduce(param.grad, op=hvd.Sum), other.grad)
                for buffer, other in zip(ours.buffers(), oracle.buffers(), strict=True):
                    torch.testing.assert_close(buffer, other)
            ours.eval()
            oracle.eval()
            if ours.track_running_stats:  # otherwise every batch is normalised by its own statistics
                torch.testing.assert_close(ours(whole.detach()), oracle(whole.detach()))

    three.run(fn, options)


def test_sync_batch_norm_wrong_input(three: LastingWorld) -> None:
    def fn() -> None:
        layer = hvd.SyncBatchNorm(4)
        with pytest.raises(ValueError, match=r"(?i)dim|2D"):
            layer(torch.ones(4))
        alive()

    three.run(fn)


def test_a_world_of_one(one: LastingWorld) -> None:
    def fn() -> None:
        mine = torch.tensor([1.0, -2.0], requires_grad=True)
        for op in (hvd.Sum, hvd.Average, hvd.Min, hvd.Max, hvd.Product):
            assert hvd.synchronize(hvd.allreduce_async(mine.detach(), op=op, name="x")).tolist() == [1.0, -2.0]
        hvd.allreduce(mine, op=hvd.Product).sum().backward()
        assert mine.grad.tolist() == [1.0, 1.0]
        plain = mine.detach()
        assert hvd.synchronize(hvd.allgather_async(plain)).tolist() == [1.0, -2.0]
        assert hvd.synchronize(hvd.broadcast_async(plain, 0)).tolist() == [1.0, -2.0]
        received, counts = hvd.synchronize(hvd.alltoall_async(plain))
        assert (received.tolist(), counts.tolist()) == ([1.0, -2.0], [2])
        assert hvd.synchronize(hvd.reducescatter_async(plain)).tolist() == [1.0, -2.0]
        assert [tensor.tolist() for tensor in hvd.grouped_allreduce([plain, plain])] == [[1.0, -2.0]] * 2
        sparse = hvd.sparse_allreduce_async(torch.eye(2).to_sparse(), name="s", op=hvd.Average)
        assert sparse().to_dense().tolist() == [[1.0, 0.0], [0.0, 1.0]]
        assert hvd.join() == 0
        assert hvd.global_process_set.size() == 1
        layer, oracle = hvd.SyncBatchNorm(2), torch.nn.BatchNorm1d(2)
        rows = torch.tensor([[1.0, 2.0], [3.0, 5.0]])
        torch.testing.assert_close(layer(rows), oracle(rows))

    one.run(fn)


@needs_gpus(1)
def test_sync_batch_norm_gpu(gpus: LastingWorld) -> None:
    def fn() -> None:
        size, rank, device = hvd.size(), hvd.rank(), torch.device("cuda", hvd.local_rank())
        for shape in ([size, 4, 2], [size, 4, 1]):
            torch.manual_seed(0)
            whole = torch.randn(shape, device=device).add(1)
            mine, all_of_it = whole[rank : rank + 1].clone().requires_grad_(), whole.clone().requires_grad_()
            ours, oracle = hvd.SyncBatchNorm(4).to(device), torch.nn.BatchNorm1d(4).to(device)
            factors = torch.randn(shape, device=device)
            if shape[0] * shape[2] == 1:
                continue  # one value per channel has no variance
            result, expected = ours(mine), oracle(all_of_it)
            torch.testing.assert_close(result, expected[rank : rank + 1])
            torch.testing.assert_close(ours.running_mean, oracle.running_mean)
            torch.testing.assert_close(ours.running_var, oracle.running_var)
            (result * factors[rank : rank + 1]).sum().backward()
            (expected * factors).sum().backward()
            torch.testing.assert_close(mine.grad, all_of_it.grad[rank : rank + 1], rtol=1e-4, atol=1e-5)
            weight_grad = hvd.allreduce(ours.weight.grad, op=hvd.Sum)
            torch.testing.assert_close(weight_grad, oracle.weight.grad, rtol=1e-4, atol=1e-5)

    gpus.run(fn)
