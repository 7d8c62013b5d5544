"""How fast the ranks all-reduce: the whole world, then pairs of hosts, in rounds in which no host is in two pairs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

_FIRST_BYTES = 1 << 20
_MOST_BYTES = 64 << 20
_LEAST_BYTES = 64 << 10
ALL_PAIRS_UP_TO = 8
"""Hosts up to which every pair is measured; beyond, neighbours and everyone with the first."""
_FIRST_UP_TO = 64
"""Hosts up to which each is also measured with the first one: making a group takes tens of milliseconds."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What an all-reduce reached.

    Attributes:
        ranks: Who took part, by name of host.
        transport: "gloo", "nccl" or "mpi".
        bytes: Size of the tensor.
        seconds: Of one all-reduce.
        gb_per_s: What each rank sends, and receives, in GB a second: 2 (n - 1) / n times bytes / seconds.
    """

    ranks: tuple[str, ...]
    transport: str
    bytes: int
    seconds: float
    gb_per_s: float


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """Pairs of ``count`` hosts in rounds; in one round no host is in two pairs.

    Up to eight hosts every pair comes once (a round-robin tournament). Beyond, each host meets its neighbour and, up to
    64 hosts, the first one, so that the time grows with the number of hosts and not with its square.
    """
    if count < 2:
        return []
    if count <= ALL_PAIRS_UP_TO:
        return _tournament(count)
    ring = [(i, (i + 1) % count) for i in range(count)]
    even, odd = ring[0 : count - count % 2 : 2], ring[1 : count - count % 2 : 2]
    last = [[ring[-1]]] if count % 2 else []
    with_first = [[(0, i)] for i in range(2, count - 1)] if count <= _FIRST_UP_TO else []
    return [[_ordered(pair) for pair in each] for each in (even, odd, *last, *with_first)]


def _tournament(count: int) -> list[list[tuple[int, int]]]:
    players: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    half, found = len(players) // 2, []
    for _ in range(len(players) - 1):
        facing = zip(players[:half], reversed(players[half:]), strict=True)
        found.append(sorted(_ordered((a, b)) for a, b in facing if a is not None and b is not None))
        players = [players[0], players[-1], *players[1:-1]]
    return found


def _ordered(pair: tuple[int, int]) -> tuple[int, int]:
    return min(pair), max(pair)


def measure(seconds: float, transport: str) -> list[Measured]:
    """Measure in the ranks of a run; the same call on every rank.

    Args:
        seconds: Time for the whole world, and again for all pairs of hosts together.
        transport: "gloo" or "nccl" for torch.distributed's process group of that name, "mpi" for the world's own.

    Returns:
        On rank 0: the world first, then pairs of hosts. Empty on other ranks.
    """
    import torch
    import torch.distributed as dist

    import spark_hvd.torch as hvd

    device = torch.device("cuda", torch.cuda.current_device()) if transport == "nccl" else torch.device("cpu")
    places = hvd.allgather_object((hvd.rank(), hvd.local_rank(), _host_name()))
    if transport == "mpi":
        everyone = tuple(name for _, _, name in places)
        found = [_measure(_through_hvd(hvd), everyone, transport, seconds, device)]
        return found if hvd.rank() == 0 else []
    found = [_measure(_through_torch(dist, None), tuple(name for _, _, name in places), transport, seconds, device)]
    leaders = [(rank, name) for rank, local_rank, name in places if local_rank == 0]
    plan = rounds(len(leaders))
    mine = []
    for pairs in plan:
        groups = [dist.new_group([leaders[a][0], leaders[b][0]]) for a, b in pairs]  # every rank makes every group
        for (a, b), group in zip(pairs, groups, strict=True):
            if hvd.rank() in (leaders[a][0], leaders[b][0]):
                names = (leaders[a][1], leaders[b][1])
                got = _measure(_through_torch(dist, group), names, transport, seconds / len(plan), device)
                mine += [got] if hvd.rank() == leaders[a][0] else []
        hvd.allgather_object(None)  # the next round begins when all are through with this one
    pairs_found = [each for of_rank in hvd.allgather_object(mine) for each in of_rank]
    return found + pairs_found if hvd.rank() == 0 else []


def _host_name() -> str:
    import socket

    return socket.gethostname()


Reduce = Callable[[Any, bool], None]
"""All-reduces a tensor in place; True for the maximum instead of the sum."""


def _through_torch(dist: Any, group: Any) -> Reduce:
    def reduce(tensor: Any, maximum: bool) -> None:
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM, group=group)

    return reduce


def _through_hvd(hvd: Any) -> Reduce:
    def reduce(tensor: Any, maximum: bool) -> None:
        hvd.allreduce_(tensor, op=hvd.Max if maximum else hvd.Sum, name="spark_hvd.doctor")

    return reduce


def _measure(reduce: Reduce, ranks: Sequence[str], transport: str, seconds: float, device: Any) -> Measured:
    import torch

    def agree(value: float) -> float:
        """The slowest rank's value: all ranks have to count alike."""
        tensor = torch.tensor([value], dtype=torch.float64, device=device)
        reduce(tensor, True)
        return float(tensor.item())

    def once(tensor: Any, times: int = 1) -> float:
        agree(0.0)  # start together
        start = time.perf_counter()
        for _ in range(times):
            reduce(tensor, False)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return agree(time.perf_counter() - start)

    def zeros(size: int) -> Any:
        return torch.zeros(size // 4, dtype=torch.float32, device=device)

    once(zeros(_LEAST_BYTES))  # connections are made when they are first used
    guess = once(zeros(_FIRST_BYTES))
    size = int(_FIRST_BYTES * (seconds / 10) / max(guess, 1e-6))
    size = min(max(size, _LEAST_BYTES), _MOST_BYTES) // 4096 * 4096
    tensor = zeros(size)
    times = max(1, int(seconds / max(once(tensor), 1e-6)))
    each = once(tensor, times) / times
    count = len(ranks)
    return Measured(tuple(ranks), transport, size, each, 2 * (count - 1) / count * size / each / 1e9)
