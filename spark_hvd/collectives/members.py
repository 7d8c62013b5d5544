"""The members of a process set and their means of communication: process groups and shared memory."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from spark_hvd.collectives.fusion import Batch
from spark_hvd.collectives.messages import bytes_of
from spark_hvd.collectives.pending.slots import KINDS, Slots, may_serve
from spark_hvd.collectives.pending.use import LARGEST
from spark_hvd.transport.communicator import Communicator, ReduceOp
from spark_hvd.transport.connections import Abortable, Several
from spark_hvd.transport.distributed import MPI_BACKEND, TorchCommunicator
from spark_hvd.transport.exchange import exchange
from spark_hvd.transport.groups import GROUP_PREFIX, Groups
from spark_hvd.transport.host.arena import SharedArena
from spark_hvd.transport.host.hierarchy import Hierarchy
from spark_hvd.transport.host.pipes import Pipes
from spark_hvd.transport.host.shared_memory import sum_share
from spark_hvd.transport.host.sliced import LEAST_AT_HOME as LEAST
from spark_hvd.transport.host.sliced import PARTS, SlicedStaging
from spark_hvd.transport.local import LocalCommunicator
from spark_hvd.transport.mpi import backend as mpi_backend
from spark_hvd.transport.nccl import NcclGroups
from spark_hvd.world.config import Config
from spark_hvd.world.layout import WorldLayout

_log = logging.getLogger("spark_hvd")
_warned = False

CAPACITY = 8 << 20
"""Bytes of each rank's buffer; larger all-reduces take several rounds."""
_DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64}


class Staging:
    """Memory for all-reduces, shared by all ranks of a process set whose ranks are on one host.

    Each rank copies its elements into its own buffer, sums its share of all ranks' buffers, and copies the result out:
    three passes over memory instead of two trips through the loopback interface. Barriers of the queue's communicator
    separate the passes, so that a lost rank is noticed.

    ``buffers`` are bytes (uint8), in rank order; ``place`` is this rank's place in the process set.
    """

    def __init__(self, buffers: Sequence[torch.Tensor], place: int) -> None:
        self._buffers = buffers
        self._place = place

    def serves(self, batch: Batch) -> bool:
        """Return whether a batch uses this memory; all ranks get the same answer.

        This includes batches with small tensors if the order of addition shows in the result. Slots and this memory sum
        in rank order, but Gloo's order depends on what else is in the batch.
        """
        return is_plain_sum(batch) and (batch.nbytes >= LEAST or self._order_shows(batch))

    def _order_shows(self, batch: Batch) -> bool:
        size = len(self._buffers)
        return (
            size > 2
            and may_serve(size)
            and getattr(torch, batch[0].request.dtypes[0]).is_floating_point
            and any(bytes_of(entry.request) <= LARGEST for entry in batch)
        )

    def room(self, dtype: torch.dtype) -> int:
        """Return how many elements a buffer holds."""
        return CAPACITY // dtype.itemsize

    def mine(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """Return the beginning of this rank's buffer, flat."""
        return _view(self._buffers[self._place], dtype, numel)

    def sum_share(self, dtype: torch.dtype, numel: int, finish: Callable[[torch.Tensor], None]) -> None:
        """Sum this rank's share of all buffers into all of them; every rank must have filled its own buffer.

        ``finish`` turns a sum into the result, in place and element by element.
        """
        sum_share([_view(buffer, dtype, numel) for buffer in self._buffers], self._place, finish)


def is_plain_sum(batch: Batch) -> bool:
    """Return whether a batch can be summed in memory; all ranks get the same answer."""
    request = batch[0].request
    return (
        request.kind == "allreduce"
        and request.op in (ReduceOp.SUM.name, ReduceOp.AVERAGE.name)
        and request.device == "cpu"
        and batch[0].absent is None
        and {getattr(torch, dtype) for dtype in request.dtypes} <= _DTYPES
        and len(set(request.dtypes)) == 1
        # Averages of int32 are sent as 64 bits: their sum may exceed 32.
        and (request.op, request.dtypes[0]) != (ReduceOp.AVERAGE.name, "int32")
    )


def _open_memory(
    group: dist.ProcessGroup, ranks: Sequence[int], hosts: Sequence[str], wanted: bool, timeout: float | None
) -> tuple[Staging | None, Slots | None, SlicedStaging | None]:
    """Map shared memory for large and for small all-reduces; collective over `group`, which nobody else uses.

    Returns:
        None for each, on every rank, if the members are on several hosts, if one of them declines, or if one cannot
        create such memory or map another's. No slots and no slices if there are too many members. No slices if
        ``timeout``, the seconds that a rank waits for the others, is None.
    """
    if len(set(hosts)) > 1 or not hasattr(os, "memfd_create") or "cpu" not in str(dist.get_backend_config(group)):
        return None, None, None
    cpu, place = torch.device("cpu"), dist.get_rank(group)
    small = may_serve(len(hosts))
    arena = None
    if wanted:
        try:
            arena = SharedArena([(CAPACITY, torch.uint8), *([*KINDS, *PARTS] if small else ())])
        except OSError as error:
            _warn_once(error)
    if not all(exchange(arena is not None, group, cpu)) or arena is None:
        return None, None, None
    ask = functools.partial(exchange, group=group, device=cpu)
    gathered = arena.map_all(place, ask)
    if gathered is None:
        return None, None, None
    staging = Staging(gathered[0], place)
    if not small:
        return staging, None, None
    # One pipe for each pair of ranks; cheap, as there are few ranks.
    pipes = None if timeout is None else Pipes.open(ranks, place, timeout, ask)
    sliced = None if pipes is None else SlicedStaging(pipes, gathered[3:])
    return staging, Slots(gathered[1], gathered[2], place), sliced


def _warn_once(error: OSError) -> None:
    global _warned
    if not _warned:  # warn once, however many process sets there are
        _warned = True
        _log.warning("The ranks of this host share no memory, and exchange all data by sockets: %s", error)


def _view(buffer: torch.Tensor, dtype: torch.dtype, numel: int) -> torch.Tensor:
    return buffer[: numel * dtype.itemsize].view(dtype)


@dataclass(frozen=True, slots=True)
class Members:
    """The ranks of a process set, from the point of view of one of them."""

    ranks: Sequence[int]
    """The ranks of the members in the world, ascending."""
    hosts: Sequence[str]
    """The host of each member."""
    place: int
    """The place of this rank among the members."""
    communicator: Communicator
    """The communicator, over process groups that nobody else uses."""
    staging: Staging | None = None
    """Memory that the members share, if any."""
    slots: Slots | None = None
    """Shared memory for small repeated calls, if any."""
    connections: Abortable | None = None
    """The connections of the communicator, if they can be aborted."""
    nccl: NcclGroups | None = None
    """The process groups to abort when one of the ranks is lost."""
    on_loss: Callable[[int, str], None] = lambda rank, text: None
    """Called with the number in the world of a rank that has left or is lost, and what is known about it."""
    sliced: SlicedStaging | None = None
    """Memory that the ranks of a host share, with the thread that sums in it."""

    def slices(self, batch: Batch) -> bool:
        """Return whether a batch goes through :attr:`sliced`; all ranks get the same answer."""
        return self.sliced is not None and batch.nbytes >= self.sliced.least and is_plain_sum(batch)

    def stages(self, batch: Batch) -> bool:
        """Return whether a batch goes through :attr:`staging`; all ranks get the same answer."""
        return self.staging is not None and not self.slices(batch) and self.staging.serves(batch)


def open_members(
    process_set_id: int,
    ranks: Sequence[int],
    layout: WorldLayout,
    me: int,
    groups: Groups,
    config: Config,
    nccl: NcclGroups,
) -> Members:
    """Open the communication of a process set; each of its ranks must call this.

    ``process_set_id`` is 0 for the world. ``ranks``, ascending, and ``me`` are numbers in the world. ``nccl`` holds all
    process groups that become useless when one of the ranks is lost.
    """
    hosts = [layout.ranks[rank].host for rank in ranks]
    place = list(ranks).index(me)
    if len(ranks) == 1:
        return Members(ranks, hosts, place, LocalCommunicator())
    group, connections = groups.make_known(process_set_id, ranks)
    on_gloo = dist.get_backend(group) != MPI_BACKEND
    timeout = groups.timeout if on_gloo else None
    staging, slots, sliced = _open_memory(group, ranks, hosts, config.shared_memory, timeout)
    communicator = TorchCommunicator(group)
    if on_gloo:
        if sliced is not None:
            groups.keep(process_set_id, sliced)
        wanted = config.shared_memory and config.hierarchical_allreduce
        levels = Hierarchy.open(process_set_id, ranks, hosts, wanted, groups, group)
        if levels is not None:
            sliced = SlicedStaging.open(levels, process_set_id, groups, group)
        ends = connections if sliced is None else Several([connections, *sliced.ends])
        return Members(ranks, hosts, place, communicator, staging, slots, ends, nccl, sliced=sliced)
    on_loss = mpi_backend.on_loss("" if groups.owns_default_group else GROUP_PREFIX)
    endpoint = mpi_backend.endpoint_of(group)
    return Members(ranks, hosts, place, communicator, staging, slots, endpoint, on_loss=on_loss)
