"""Ways to bring gradients together, written with plain send and recv: ring, tree, parameter servers, two levels.

Each is what the books say and no more, so that a cable carries what the books say; `dist.all_reduce` is the peer that
shows whether these are written well. Tensors are flat float32; all-reduces sum in place. What a process waits for is
asked for before it sends: Gloo asks by a message, which would else stand behind the data on the same connection, and
the two directions of a cable would take turns.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

PUSH, PULL = 1, 2
"""Tags: gradients on their way to a server, and parameters on their way back."""


def ring(tensor: Tensor, rank: int, ranks: int, group: dist.ProcessGroup | None = None) -> None:
    """Reduce-scatter and all-gather, each in n - 1 rounds of an n-th of the bytes to the right-hand neighbour.

    Args:
        tensor: Summed in place over the ranks.
        rank: This one's place in the ring.
        ranks: Length of the ring.
        group: Whose ranks they are; all of the world's first ones without.
    """
    parts = tensor.tensor_split(ranks)
    inbox = torch.empty_like(parts[0])
    right, left = (rank + 1) % ranks, (rank - 1) % ranks

    def send_and_take(out: Tensor, into: Tensor) -> None:
        taken = dist.irecv(into, group=group, group_src=left) if group else dist.irecv(into, left)
        sent = dist.isend(out, group=group, group_dst=right) if group else dist.isend(out, right)
        _wait([taken, sent])

    for turn in range(ranks - 1):
        into = parts[(rank - turn - 1) % ranks]
        send_and_take(parts[(rank - turn) % ranks], inbox[: into.numel()])
        into.add_(inbox[: into.numel()])
    for turn in range(ranks - 1):
        send_and_take(parts[(rank - turn + 1) % ranks], parts[(rank - turn) % ranks])


def tree(tensor: Tensor, rank: int, ranks: int) -> None:
    """A binomial tree: sums go up to rank 0 in log2 n rounds of all bytes, and come down in as many."""
    inbox = torch.empty_like(tensor)
    children = []
    reach = 1
    while reach < ranks and not rank & reach:
        if rank + reach < ranks:
            dist.recv(inbox, rank + reach)
            tensor.add_(inbox)
            children.append(rank + reach)
        reach <<= 1
    if rank:
        dist.send(tensor, rank - reach)
        dist.recv(tensor, rank - reach)
    for child in reversed(children):
        dist.send(tensor, child)


class Server:
    """A process that holds parameters, or a part of them, and applies the mean of what all workers push.

    Args:
        parameters: What it holds; changed in place.
        workers: Ranks that push.
        rate: Learning rate of plain SGD.
    """

    def __init__(self, parameters: Tensor, workers: Sequence[int], rate: float) -> None:
        self._parameters, self._workers, self._rate = parameters, workers, rate
        self._inbox = torch.empty(len(workers), parameters.numel())

    def step(self) -> None:
        """Take a gradient from each worker, change the parameters, and send them to all."""
        taken = [dist.irecv(box, worker, tag=PUSH) for box, worker in zip(self._inbox, self._workers, strict=True)]
        _wait(taken)
        self._parameters.sub_(self._inbox.sum(0), alpha=self._rate / len(self._workers))
        _wait([dist.isend(self._parameters, worker, tag=PULL) for worker in self._workers])


def push_and_pull(gradient: Tensor, parameters: Tensor, servers: Sequence[int]) -> None:
    """A worker's step: a part of the gradient to each server, and its part of the parameters back."""
    cut = len(servers)
    taken = [
        dist.irecv(part, server, tag=PULL) for part, server in zip(parameters.tensor_split(cut), servers, strict=True)
    ]
    sent = [
        dist.isend(part, server, tag=PUSH) for part, server in zip(gradient.tensor_split(cut), servers, strict=True)
    ]
    _wait(sent + taken)


def servers_beside_workers(gradient: Tensor, parameters: Tensor, rank: int, ranks: int, rate: float) -> None:
    """A step where each worker's host also serves an n-th of the parameters."""
    gradients, held = gradient.tensor_split(ranks), parameters.tensor_split(ranks)
    others = [(rank + turn) % ranks for turn in range(1, ranks)]  # each begins with another one
    mine = held[rank]
    inbox = torch.empty(ranks - 1, mine.numel())
    taken = [dist.irecv(box, other, tag=PUSH) for box, other in zip(inbox, others, strict=True)]
    pulled = [dist.irecv(held[other], other, tag=PULL) for other in others]
    pushed = [dist.isend(gradients[other], other, tag=PUSH) for other in others]
    _wait(taken)
    mine.sub_(inbox.sum(0).add_(gradients[rank]), alpha=rate / ranks)
    _wait(pushed + pulled + [dist.isend(mine, other, tag=PULL) for other in others])


class TwoLevel:
    """An all-reduce in three parts: summed by slices in a host's shared memory, between hosts by a ring for each slice
    that one rank of each host is in, and copied out of shared memory.

    All ranks of the world make it together.

    Args:
        numel: Of the longest tensor.
        rank: In the world; the ranks of a host are next to each other.
        ranks: Size of the world.
        per_host: Ranks on each host.
    """

    def __init__(self, numel: int, rank: int, ranks: int, per_host: int) -> None:
        self._place, self._per_host = rank % per_host, per_host
        self._host, self._hosts = rank // per_host, ranks // per_host
        self._local = self._across = dist.GroupMember.WORLD
        for host in range(self._hosts):
            group = dist.new_group([host * per_host + place for place in range(per_host)])
            self._local = group if host == self._host else self._local
        for place in range(per_host):
            group = dist.new_group([host * per_host + place for host in range(self._hosts)])
            self._across = group if place == self._place else self._across
        path = Path(f"/dev/shm/two-level-{os.environ['MASTER_PORT']}")
        self._boxes = torch.from_file(str(path), shared=True, size=numel * per_host).view(per_host, numel)
        dist.barrier(self._local)
        path.unlink(missing_ok=True)  # mapped by all ranks of the host; gone with them

    def __call__(self, tensor: Tensor) -> None:
        """Sum in place over all ranks."""
        boxes = self._boxes[:, : tensor.numel()]
        boxes[self._place].copy_(tensor)
        dist.barrier(self._local)
        slices = [box.tensor_split(self._per_host)[self._place] for box in boxes]
        mine = slices[0]
        for other in slices[1:]:
            mine.add_(other)
        if self._hosts > 1:
            ring(mine, self._host, self._hosts, self._across)
        dist.barrier(self._local)
        tensor.copy_(boxes[0])
        dist.barrier(self._local)  # nobody writes the next tensor before all have read this one


def _wait(works: Sequence[dist.Work | None]) -> None:
    for work in works:
        if work is not None:
            work.wait()
