"""What runs over MPI: torch.distributed with DDP, process sets, optimizers, copies of unreachable memory, waiting."""

from __future__ import annotations

import importlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import cloudpickle
import pytest
import torch
import torch.distributed as dist

import spark_hvd.torch as hvd
from spark_hvd.context.global_state import current
from spark_hvd.transport.communicator import ReduceOp
from tests.contract import optimizer_cases, optimizer_odd_cases, shared_memory_cases
from tests.ranks import Ranks, ranks

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def world() -> Iterator[Ranks]:
    with ranks(2, mpi=True) as started:
        yield started


def mine(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Different numbers on every rank."""
    return (torch.arange(torch.Size(shape).numel()).reshape(shape) + 10 * dist.get_rank()).to(dtype)


def of(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(torch.Size(shape).numel()).reshape(shape) + 10 * rank).to(dtype)


def names() -> None:
    assert dist.get_backend() == "mpi4py"
    assert hvd.mpi_enabled()
    assert hvd.mpi_threads_supported()
    assert hvd.mpi_built()
    assert not hvd.gloo_enabled()


def reductions() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.int16):
        total = of(0, 6, dtype=dtype) + of(1, 6, dtype=dtype)
        for op, expected in ((dist.ReduceOp.SUM, total), (dist.ReduceOp.MAX, of(size - 1, 6, dtype=dtype))):
            tensor = mine(6, dtype=dtype)
            dist.all_reduce(tensor, op)
            assert torch.equal(tensor, expected)
        tensor = mine(6, dtype=dtype)
        dist.reduce(tensor, dst=1)
        assert torch.equal(tensor, total if rank == 1 else of(rank, 6, dtype=dtype))
        share = torch.empty(3, dtype=dtype)
        dist.reduce_scatter_tensor(share, mine(6, dtype=dtype))
        assert torch.equal(share, total[3 * rank : 3 * rank + 3])
        dist.reduce_scatter(share, [mine(6, dtype=dtype)[:3], mine(6, dtype=dtype)[3:]])
        assert torch.equal(share, total[3 * rank : 3 * rank + 3])
    average = mine(3)
    dist.all_reduce(average, dist.ReduceOp.AVG)
    assert average.tolist() == [5.0, 6.0, 7.0]
    bits = torch.tensor([1 << rank])
    dist.all_reduce(bits, dist.ReduceOp.BOR)
    assert bits.tolist() == [3]
    strided = mine(4, 4).t()[1:]
    dist.all_reduce(strided)
    assert torch.equal(strided, (of(0, 4, 4) + of(1, 4, 4)).t()[1:])
    with pytest.raises(ValueError, match="PREMUL_SUM"):
        dist.all_reduce(torch.ones(1), dist._make_nccl_premul_sum(2.0))  # type: ignore[attr-defined]


def moves() -> None:
    rank = dist.get_rank()
    tensor = mine(2, 3)
    dist.broadcast(tensor, src=1)
    assert torch.equal(tensor, of(1, 2, 3))
    gathered = [torch.empty(2, 3) for _ in range(2)]
    dist.all_gather(gathered, mine(2, 3))
    assert torch.equal(torch.stack(gathered), torch.stack([of(0, 2, 3), of(1, 2, 3)]))
    uneven = [torch.empty(1), torch.empty(2)]
    dist.all_gather(uneven, mine(rank + 1))
    assert [each.tolist() for each in uneven] == [[0.0], [10.0, 11.0]]
    whole = torch.empty(4, 3)
    dist.all_gather_into_tensor(whole, mine(2, 3))
    assert torch.equal(whole, torch.cat([of(0, 2, 3), of(1, 2, 3)]))
    at_root = [torch.empty(3), torch.empty(3)] if rank == 1 else None
    dist.gather(mine(3), at_root, dst=1)
    assert at_root is None or torch.equal(torch.stack(at_root), torch.stack([of(0, 3), of(1, 3)]))
    part = torch.empty(2)
    dist.scatter(part, [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])] if rank == 0 else None, src=0)
    assert part.tolist() == [2.0 * rank + 1, 2.0 * rank + 2]
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, {"rank": rank})
    assert everyone == [{"rank": 0}, {"rank": 1}]


def all_to_all() -> None:
    rank = dist.get_rank()
    # rank 0 sends 1 row to itself and 2 to rank 1, which sends 2 and 1
    sent = [[1, 2], [2, 1]]
    received = [sent[other][rank] for other in range(2)]
    out = torch.empty(sum(received), 2)
    dist.all_to_all_single(out, mine(3, 2), received, sent[rank])
    expected = [torch.split(of(other, 3, 2), sent[other])[rank] for other in range(2)]
    assert torch.equal(out, torch.cat(expected))
    parts = [torch.empty(count, 2) for count in received]
    dist.all_to_all(parts, list(torch.split(mine(3, 2), sent[rank])))
    assert all(torch.equal(*pair) for pair in zip(parts, expected, strict=True))
    even = torch.empty(2, 2)
    dist.all_to_all_single(even, mine(2, 2))
    assert torch.equal(even, torch.stack([of(0, 2, 2)[rank], of(1, 2, 2)[rank]]))
    with pytest.raises(ValueError, match="3 rows"):
        dist.all_to_all_single(torch.empty(3), torch.empty(3))


def point_to_point() -> None:
    rank = dist.get_rank()
    tensor = torch.empty(4)
    if rank == 0:
        dist.send(mine(4), dst=1, tag=7)
        dist.recv(tensor, src=1)
    else:
        dist.recv(tensor, src=0, tag=7)
        dist.send(mine(4), dst=0)
    assert torch.equal(tensor, of(1 - rank, 4))
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, mine(2), 1 - rank), dist.P2POp(dist.irecv, tensor[:2], 1 - rank)]
    )
    for work in works:
        work.wait()
    assert torch.equal(tensor[:2], of(1 - rank, 2))


def futures() -> None:
    rank = dist.get_rank()
    tensor, narrow = mine(1000), mine(5, dtype=torch.bfloat16)
    works = [dist.all_reduce(tensor, async_op=True), dist.all_reduce(narrow, async_op=True)]
    values = [work.get_future().wait()[0] for work in works]  # nobody waits for the works themselves
    assert torch.equal(values[0], of(0, 1000) + of(1, 1000))
    assert torch.equal(values[1], of(0, 5, dtype=torch.bfloat16) + of(1, 5, dtype=torch.bfloat16))
    assert works[0].is_completed()
    assert works[0].is_success()
    assert works[0].exception() is None
    subset = dist.new_group([1], use_local_synchronization=True)
    if rank == 1:
        alone = mine(2)
        dist.all_reduce(alone, group=subset)
        assert torch.equal(alone, of(1, 2))
        dist.destroy_process_group(subset)


def defects_reach_who_waits() -> None:
    """Whatever fails in the thread that keeps MPI moving, futures are completed, and the next collective runs."""
    from spark_hvd.transport.mpi.progress import PROGRESS, Operation

    def future_of(*tensors: torch.Tensor) -> torch.futures.Future[Any]:
        return dist.all_reduce(tensors[0], async_op=True).get_future()

    def within_seconds(future: torch.futures.Future[Any]) -> Any:
        until = time.monotonic() + 10
        while not future.done() and time.monotonic() < until:
            time.sleep(1e-3)
        assert future.done()
        return future.wait()

    def defect(*_: Any) -> bool:
        raise RuntimeError("a defect")

    called = threading.Event()
    PROGRESS.later(0.0, defect)
    PROGRESS.later(0.0, called.set)
    assert called.wait(60)
    hvd.barrier()
    assert within_seconds(future_of(torch.ones(3)))[0].tolist() == [2.0] * 3

    hvd.barrier()
    with mock.patch.object(Operation, "poll", defect):
        broken = future_of(torch.ones(3))
        with pytest.raises(RuntimeError, match="the thread that keeps MPI moving has failed: RuntimeError: a defect"):
            within_seconds(broken)
    hvd.barrier()
    assert within_seconds(future_of(torch.ones(3)))[0].tolist() == [2.0] * 3

    work: Any = dist.all_reduce(torch.ones(3), async_op=True)
    work._finish = defect
    with pytest.raises(RuntimeError, match="a defect"):
        within_seconds(work.get_future())
    hvd.barrier()


def distributed_data_parallel() -> None:
    def model() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))

    def train(net: torch.nn.Module, rows: slice) -> list[torch.Tensor]:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        generator = torch.Generator().manual_seed(1)
        for _ in range(3):
            batch = torch.randn(8, 6, generator=generator)
            optimizer.zero_grad()
            net(batch[rows]).square().mean().backward()
            optimizer.step()
        return [each.detach().clone() for each in net.parameters()]

    rank = dist.get_rank()
    alone = train(model(), slice(None))
    for options in ({"bucket_cap_mb": 1e-4}, {"gradient_as_bucket_view": True, "static_graph": True}):
        together = train(torch.nn.parallel.DistributedDataParallel(model(), **options), slice(4 * rank, 4 * rank + 4))
        for ours, theirs in zip(together, alone, strict=True):
            torch.testing.assert_close(ours, theirs)


def process_sets() -> None:
    rank = hvd.rank()
    for _ in range(3):
        sets = [hvd.add_process_set([0]), hvd.add_process_set([1])]
        ours = sets[rank]
        assert hvd.allreduce(torch.tensor([rank + 1.0]), op=hvd.Sum, process_set=ours).item() == rank + 1
        for each in sets:
            assert hvd.remove_process_set(each)
    both = hvd.ProcessSet([1, 0])
    with pytest.raises(ValueError, match="has the ranks"):
        hvd.add_process_set(both)
    assert hvd.broadcast_object({"from": rank}, root_rank=1) == {"from": 1}
    assert current().queue.members.staging is not None
    large = torch.full((1 << 20,), float(rank + 1))
    assert hvd.allreduce(large, op=hvd.Sum).unique().tolist() == [3.0]


def unreachable_memory() -> None:
    """The contract's cases that move the most, as if MPI could not reach any tensor."""
    from spark_hvd.transport.mpi import memory

    cases = importlib.import_module("tests.contract.test_communicator")
    with mock.patch.object(memory, "reaches", return_value=False):
        cases.allreduce_strides()
        cases.allgather_uneven()
        cases.broadcast_everything()
        cases.alltoall_everything()
        cases.handles()
        whole = torch.empty(10)
        future: Any = dist.all_gather_into_tensor(whole, mine(5), async_op=True).get_future()
        future.wait()
    assert torch.equal(whole, torch.cat([of(0, 5), of(1, 5)]))


def callbacks_come_by_themselves() -> None:
    communicator = current().communicator
    for sleep in (0.0, 0.1):  # the thread is awake, and asleep
        time.sleep(sleep)
        ended = threading.Event()
        big = torch.ones(1 << 21)
        handle = communicator.allreduce(big, ReduceOp.SUM)
        handle.when_done(ended.set)
        assert ended.wait(10)
        assert handle.done()
        assert handle.wait()[0] == communicator.size
        late = threading.Event()
        handle.when_done(late.set)
        assert late.is_set()


def many_threads() -> None:
    """Operations of several communicators from several threads, waited for in another order than they were started."""
    rank = dist.get_rank()
    groups = [current().new_group(0) for _ in range(3)]
    wrong: list[str] = []

    def work(group: dist.ProcessGroup) -> None:
        for number in range(40):
            tensors = [torch.full((size,), float(rank + number)) for size in (1, 5000, 100_000)]
            works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
            for each in reversed(works):
                each.wait()
            wrong.extend(str(each[0]) for each in tensors if each[0] != 2 * number + 1 or each[-1] != 2 * number + 1)

    threads = [threading.Thread(target=work, args=[group]) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def an_idle_rank_sleeps() -> None:
    hvd.barrier()
    time.sleep(0.2)
    before = time.thread_time(), time.process_time()
    time.sleep(1.0)
    assert time.process_time() - before[1] < 0.1


@pytest.mark.parametrize(
    "case",
    [
        names,
        reductions,
        moves,
        all_to_all,
        point_to_point,
        futures,
        defects_reach_who_waits,
        distributed_data_parallel,
        process_sets,
        unreachable_memory,
        callbacks_come_by_themselves,
        many_threads,
        an_idle_rank_sleeps,
    ],
    ids=lambda case: case.__name__,
)
def test_mpi(world: Ranks, case: Callable[[], None]) -> None:
    world.run(case)


@pytest.mark.parametrize(
    "case",
    [
        optimizer_cases.average,
        optimizer_cases.sparse_gradients,
        optimizer_odd_cases.overlap,
        optimizer_odd_cases.unused_parameters,
        optimizer_odd_cases.plan_mismatch,
        shared_memory_cases.ranks_out_of_step,
        shared_memory_cases.memory_and_gloo_give_the_same_bits,
    ],
    ids=lambda case: case.__name__,
)
def test_optimizer(world: Ranks, case: Callable[[int, int], None]) -> None:
    def fn(module: str, name: str) -> None:
        torch.manual_seed(0)
        getattr(importlib.import_module(module), name)(hvd.rank(), hvd.size())

    world.run(fn, case.__module__, case.__name__)


def test_a_peer_that_does_not_come(world: Ranks) -> None:
    def fn() -> str:
        hvd.barrier()
        tensor = torch.ones(1)
        if hvd.rank() == 1:
            time.sleep(2.5)
            dist.all_reduce(tensor)
            return "came late"
        work: Any = dist.all_reduce(tensor, async_op=True)
        assert not work.is_completed()
        with pytest.raises(hvd.CollectiveError, match=r"waited for other ranks for 0\.3 s"):
            work.wait(timedelta(seconds=0.3))
        work.wait()
        assert tensor.item() == 2.0  # it continued
        return "waited"

    assert world.run(fn) == ["waited", "came late"]


def test_a_rank_that_leaves_and_a_world_after_it(world: Ranks) -> None:
    def fn() -> float:
        hvd.barrier()
        if hvd.rank() == 1:
            time.sleep(0.3)
            hvd.shutdown()
        else:
            start = time.monotonic()
            with pytest.raises(hvd.CollectiveError, match=r"rank 1 .* has left the world"):
                current().communicator.allreduce(torch.ones(1), ReduceOp.SUM).wait()
            assert time.monotonic() - start < 30
            with pytest.raises(hvd.CollectiveError, match="has left the world"):
                dist.all_reduce(torch.ones(1))
            hvd.shutdown()
        hvd.init()
        return float(hvd.allreduce(torch.tensor(1.0 + hvd.rank()), op=hvd.Sum))

    assert world.run(fn) == [3.0, 3.0]


@pytest.mark.slow  # it loads torch
def test_a_program_that_ends_ends_mpi() -> None:
    program = """
import atexit, sys
atexit.register(lambda: print(sys.modules["mpi4py.MPI"].Is_finalized(), PROGRESS._closed))  # called last
import spark_hvd.torch as hvd
from spark_hvd.transport.mpi.progress import PROGRESS  # starts MPI
PROGRESS.later(60.0, print)  # a thread keeps it moving
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=250)
    assert done.stdout == "True True\n"
